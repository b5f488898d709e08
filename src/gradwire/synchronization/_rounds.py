"""Rounds among neighbours (`gossip`): steps alone, then an average with the neighbours.

A round begins before its first gradient, where some algorithms send or combine models already, and
ends after its last step with the walk: the change of the parameters by the optimizer in between. A
worker that joins in the middle of a round trains alone until the next one begins.
"""

from torch import Tensor

from gradwire.core.batched import elementwise
from gradwire.core.protocols import Replica, Worker


async def mixed_step(
    worker: Worker,
    replica: Replica,
    step: int,
    *,
    begins: bool = True,
    ends: bool = True,
    period: int = 1,
) -> Replica:
    """One training step, with which a round begins or ends, or both.

    While a round is under way, "start" in the memory holds the parameters it began with.
    """
    mixing = worker.mixing
    if begins:
        replica = await mixing.before(replica, step, period)
        replica = replica.remembering(start=replica.params)
    else:
        await mixing.attend(replica, step)
    gradient, replica = await worker.gradient(replica, step)
    if gradient is not None:
        replica = await worker.update(replica, gradient, step, shared=False)
    if not ends:
        return replica
    if "start" not in replica.memory:
        await mixing.miss(step)
        return replica
    memory = dict(replica.memory)
    start = memory.pop("start")
    walk = await worker.node.call(_walk, replica.params, start)
    return await mixing.after(replica.having(params=start, memory=memory), walk, step)


@elementwise
def _walk(end: Tensor, start: Tensor) -> Tensor:
    return end - start
