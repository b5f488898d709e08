"""A node that leaves, and does not reach everybody any more."""

from gradwire.runtime.process import frames
from gradwire.runtime.process.transport import GOODBYE, LOST
from gradwire.runtime.process.zeromq import messages as msg
from gradwire.runtime.process.zeromq.link import Out
from runtime.process.zeromq.jobs import crash, job, next_of

SERVER, SCHEDULER = 2, 3


def test_a_goodbye_that_only_the_scheduler_heard() -> None:
    """Who has not heard it is told after a while, and does not wait forever."""
    with job(2, heartbeat_s=0.5, server_s=1.0) as made:
        leaving = made.nodes[1]
        body = bytes(frames.pack_control(frames.GOODBYE).block.numpy())
        with leaving._turns:
            link = leaving._traffic.links[SCHEDULER]
            leaving._traffic.post(link, Out(msg.DATA, 1, SCHEDULER, body, None, 0.0))
        assert next_of(made.nodes[SCHEDULER], GOODBYE).src == 1
        crash(leaving)
        made.all.remove(leaving)
        lost = next_of(made.nodes[SERVER], LOST, GOODBYE)
        assert (lost.kind, lost.src) == (LOST, 1)
        assert "left" in lost.message
