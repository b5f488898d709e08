"""What the ranks of the tests with a hostile member run, each in a process of its own.

Rank 0 is an honest worker, rank 1 a hostile one, then come two servers and the scheduler. They
train on quadratics, and the gradients of rank 1 are zero, so that the model does not depend on when
its pushes come: it is what it would be without the nonsense, bit by bit.
"""

import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.architecture.parameter_server._orders import Order
from gradwire.compression.sparsification.topk import TopK
from gradwire.core.coded import MeanOfCoded
from gradwire.core.errors import GradwireWarning
from gradwire.core.key import Key
from gradwire.core.node import Framed, Membership, Node
from gradwire.core.protocols import Replica
from gradwire.core.spec import Spec
from gradwire.core.wire import ANSWER, HEADER_NBYTES, REQUEST, Failed
from gradwire.experiment.run.roles import OtherRole, Segment, ServerRole
from gradwire.runtime.process.engine import ProcessEngine
from gradwire.runtime.process.frames import Headers
from gradwire.runtime.zeromq.transport import ZmqTransport
from gradwire.testing import quadratics
from gradwire.training import program
from gradwire.training.backward import PendingVector
from gradwire.training.server import TrainingServer
from gradwire.training.wire import AnswerHeader, PullHeader, PushHeader, answer_codec
from gradwire.training.worker import TrainingWorker
from runtime.process.parity_cases import connect

HONEST, HOSTILE, SERVER, SCHEDULER = 0, 1, 2, 4
NUM_SERVERS, STEPS, REPEATS = 2, 12, 40
CASES = (
    ("asp", "identity", "dense"),
    ("asp", "ef(topk(0.3))", "compressed"),
    ("ssp(1)", "fp16", "dense"),
)
_RUDE = ("ssp(0)", "identity", "dense")
_ORDERED = ("bsp", "ef(topk(0.3))", "compressed")
_BETRAYED = (("asp", "ef(topk(0.3))", "dense"), ("asp", "ef(topk(0.3))", "compressed"))
Case = tuple[str, str, str]
Message = Framed | Tensor


@dataclass(frozen=True)
class Alien:
    """A header that nobody else has heard of."""

    number: int


def trained(
    synchronization: str, compression: str, answers: str, optimizer: str = "server"
) -> quadratics.Trained:
    return quadratics.train(
        synchronization,
        f'parameter_server({NUM_SERVERS}, optimizer="{optimizer}", answers="{answers}")',
        compression,
        workers=2,
        steps=STEPS,
        layers=(12, 9),
        curvatures=(1.0, 0.0),
    )


_EXPECTED: dict[Case, quadratics.Trained] = {}


def prepare(size: int) -> None:
    """Before the ranks fork: what the simulator says."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradwireWarning)  # of compression whose errors may grow
        _EXPECTED.update((case, trained(*case)) for case in (*CASES, _RUDE, *_BETRAYED))
        _EXPECTED[_ORDERED] = trained(*_ORDERED, optimizer="worker")


def run(rank: int, folder: Path) -> dict[str, Any]:
    """All of it, one after the other, in one job of the transport."""
    transport, jobs = connect(rank, 2, NUM_SERVERS, folder), itertools.count()
    found = {
        "nonsense": [_trained(transport, next(jobs), case) for case in CASES],
        "rude": _rude(transport, next(jobs)),
        "ordered": _ordered(transport, next(jobs)),
        "betrayed": _betrayed(transport, jobs),
    }
    dist.barrier()
    transport.close()
    return found


async def _say(node: Node, dst: int, tag: str, message: Message) -> None:
    if isinstance(message, Framed):
        await node.send_framed(dst, tag, message, HEADER_NBYTES)
    else:
        await node.send(dst, tag, message)


# A worker that pushes nonsense.


async def nonsense(node: Node, plan: Any, replica: Replica, step: int) -> list[Message]:
    """What server 0 refuses of a worker that is at this step."""
    unit, piece = next((i, u.bucket) for i, u in enumerate(plan.units()) if u.server == 0)
    other = next(i for i, u in enumerate(plan.units()) if u.server == 1)
    key = plan.key.at(step).private(node.rank)
    zeros = torch.zeros(piece.stop - piece.start, dtype=torch.float64)
    # It compresses for itself: what error feedback keeps is not changed by it.
    pushed = await plan.reducer.push(zeros, replica.exchange[unit], key.child(piece.name), node)
    (good,) = pushed.messages
    right = PushHeader(unit, 0, 1, step, True)

    def forged(value: float) -> Tensor:
        """With a checksum that is right: no codec would encode it."""
        with patch("gradwire.core.codec.is_finite", return_value=True):
            codec, x = answer_codec(plan.reducer, step), torch.full_like(zeros, value)
            return codec.encode(x, codec.init(Spec.of(x)), key.child(piece.name))[0].buffer

    def flipped(position: int) -> Tensor:
        bad = good.clone()
        bad.view(torch.uint8)[position] ^= 0x41
        return bad

    found: list[Message] = [
        *(Framed(replace(right, unit=wrong), good) for wrong in (-1, other, 1 << 40)),
        *(Framed(replace(right, part=wrong), good) for wrong in (-1, 1, 1 << 40)),
        *(Framed(replace(right, num_parts=wrong), good) for wrong in (-1, 0, 1 << 40)),
        *(Framed(replace(right, step=wrong), good) for wrong in (-1, STEPS, 1 << 62)),
        *(Framed(replace(right, life=wrong), good) for wrong in (7.0, -1.0, float("nan"))),
        *(Framed(right, flipped(at)) for at in range(0, good.nbytes, 3)),
        Framed(right),
        Framed(right, good[:-1].clone()),
        Framed(right, torch.cat([good, good])),
        Framed(right, torch.zeros(0, dtype=torch.uint8)),
        Framed(right, torch.zeros(3, 2, dtype=torch.int64)),
        Framed(right, good.view(torch.uint8).reshape(2, -1) if good.nbytes % 2 == 0 else good[1:]),
        Framed(right, torch.full((good.numel(),), float("nan"), dtype=torch.float64)),
        Framed(PullHeader(0, life=3.0)),
        Framed(PullHeader(-1, life=float("nan"))),
        Framed(PullHeader(-7)),
        Framed(AnswerHeader(step, True, 0, True), good),
        Framed(Failed("other", "no")),
        Framed(Membership(HONEST, False, 9.0)),  # only the scheduler says so
        good,
    ]
    if repr(plan.reducer) == "identity":
        found += [Framed(right, forged(value)) for value in (float("nan"), float("inf"))]
    return found


async def hostile(node: Node, plan: Any, replica: Replica) -> tuple[Replica, list[int]]:
    """Trains, and says nonsense to server 0 before each step; how much of it was refused."""
    counts = [0, 0]  # sent, told that it was wrong

    async def refused(message: Message) -> None:
        await _say(node, SERVER, REQUEST, message)
        counts[0] += 1
        answer = await node.recv(SERVER, ANSWER)
        assert isinstance(answer.header, Failed), f"{message!r:.300} was answered: {answer}"
        assert f"rank {HOSTILE}" in answer.header.text, answer.header.text
        counts[1] += 1

    for step in range(STEPS):
        for message in await nonsense(node, plan, replica, step):
            await refused(message)
        if step == STEPS // 2:  # it does not stop saying the same
            for message in (await nonsense(node, plan, replica, step))[:4] * REPEATS:
                await refused(message)
        replica = await program.train(plan, node, replica, step, step + 1)
    return replica, counts


def _trained(transport: ZmqTransport, job: int, case: Case) -> dict[str, Any]:
    expected = _EXPECTED[case]
    plan, rank = expected.plan, transport.rank
    engine = ProcessEngine(transport, 2, evaluate=plan.task.gradients, timeout_s=20, job=job)
    found: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if rank < SERVER:
            replica = plan.initial_replicas()[rank]
            if rank == HOSTILE:
                result = engine.run(lambda node: hostile(node, plan, replica))
                assert result is not None
                found["counts"] = result[1]
            else:
                own = engine.run(lambda node: program.train(plan, node, replica, 0, STEPS))
                assert own is not None
                # Of compressed answers each worker has what it was told.
                found["is_expected"] = torch.equal(own.params, expected.params[rank])
                found["is_finite"] = bool(torch.isfinite(own.params).all())
        elif rank < SCHEDULER:
            server = TrainingServer(plan, rank - SERVER)
            engine.run(server.run)
            there = expected.servers[rank - SERVER]
            found["is_expected"] = torch.equal(server.params, there.params)
            found["refused"] = dict(server.refused)
            # What is left of all that.
            found["kept"] = [len(server._pushes.begun), len(server._events), engine.unread.nbytes]
            found["members"] = sorted(server.members)
        else:
            engine.run(lambda node: plan.architecture.daemon(node, {}))
    found["warnings"] = [str(one.message) for one in warned]
    return found


# A worker that asks out of turn, has headers of its own, and says what nobody listens to.


def _rude(transport: ZmqTransport, job: int) -> dict[str, Any]:
    """With ssp(0), so that a push is answered when the other worker has pushed, too."""
    expected = _EXPECTED[_RUDE]
    plan, rank = expected.plan, transport.rank
    engine = ProcessEngine(transport, 2, evaluate=plan.task.gradients, timeout_s=20, job=job)
    found: dict[str, Any] = {}

    async def waits(node: Node) -> Replica:
        await node.recv(HOSTILE, "go")
        return await program.train(plan, node, plan.initial_replicas()[HONEST], 0, STEPS)

    async def asks(node: Node) -> list[str]:
        worker, replica = TrainingWorker(plan, node), plan.initial_replicas()[HOSTILE]
        zeros = torch.zeros(21, dtype=torch.float64)
        replica = await worker.client.push(PendingVector(worker, zeros, 0), replica, 0, True)
        said = []
        for _ in range(REPEATS):
            await worker.client.request_model(1)  # it waits for an answer already
            answers = [await node.recv(server, ANSWER) for server in (SERVER, SERVER + 1)]
            said += [answer.header.text for answer in answers]
        for number in range(REPEATS):
            with _speaking(transport, Headers(Alien)):
                await node.send_framed(SERVER, REQUEST, Framed(Alien(number)), HEADER_NBYTES)
            await node.send_framed(SERVER, f"tag {number}", Framed(PullHeader(0)), HEADER_NBYTES)
            await node.send(SERVER, ("another tag", number), zeros)
        await node.send(HONEST, "go", zeros)
        pulled = await worker.client.receive_model(replica, replica.exchange)
        await program.train(plan, node, pulled.replica, 1, STEPS)
        return said

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if rank == HONEST:
            own = engine.run(waits)
            assert own is not None
            found["is_expected"] = torch.equal(own.params, expected.params[rank])
        elif rank == HOSTILE:
            said = engine.run(asks)
            assert said is not None
            found["said"] = sorted(set(said))
            found["told"] = transport.refused["error reply"]
        elif rank < SCHEDULER:
            server = TrainingServer(plan, rank - SERVER)
            with engine.unread.only(ServerRole.tags):
                engine.run(server.run)
            found["refused"] = dict(server.refused)
            found["malformed"] = transport.refused["malformed"]
            found["unread"] = len(engine.unread.inbox), engine.unread.nbytes
            found["dropped"] = dict(engine.unread.dropped)
            found["is_at_rest"] = engine.is_at_rest
        else:
            engine.run(lambda node: plan.architecture.daemon(node, {}))
    found["warnings"] = [str(one.message) for one in warned]
    return found


@contextmanager
def _speaking(transport: ZmqTransport, headers: Headers) -> Iterator[None]:
    """With headers of its own."""
    usual, transport.headers = transport.headers, headers
    try:
        yield
    finally:
        transport.headers = usual


# A worker that orders what has no place in the job from servers that form means.


def bad_orders() -> list[tuple[Order, Tensor]]:
    """Each would keep, or hold until others order the same, more than the model has."""
    short, everyone = torch.zeros(18, dtype=torch.uint8), (HONEST, HOSTILE)
    huge = Spec((1 << 28,), torch.float32)

    def job(spec: Spec, members: tuple[int, ...]) -> MeanOfCoded:
        return MeanOfCoded(TopK(0.01), spec, Key(0), members, Key(1), True)

    fits = Spec((10,), torch.float64)
    return [
        (Order("model", 1, (HOSTILE,), job(huge, (HOSTILE,))), short),
        (Order("model", 1, (HOSTILE,), job(fits, (HOSTILE,))), short),
        (Order("model", 1, everyone, job(huge, everyone)), short),
        *((Order(f"tensor {i}", i, everyone, job(fits, everyone)), short) for i in range(REPEATS)),
        (Order("model", 1, everyone, job(fits, everyone)), torch.zeros(1 << 20)),
        (Order("tensor", 1, everyone, None, (HONEST,)), torch.zeros(1 << 20)),
        (Order("model", 1, everyone, None, (HONEST,)), torch.zeros(1 << 20)),
    ]


async def ordering(node: Node, plan: Any, replica: Replica) -> tuple[Replica, list[str]]:
    """Trains, and orders nonsense from server 0 before each step; what it is told."""
    told = []
    for step in range(STEPS):
        for order, message in bad_orders():
            framed = Framed(order, message)
            await node.send_framed(SERVER, REQUEST, framed, HEADER_NBYTES)
            tag = (ANSWER, order.label, order.round)
            answer = await node.recv(SERVER, tag if order.job else (*tag, HONEST))
            assert isinstance(answer.header, Failed), f"{order!r:.300} was answered: {answer}"
            told.append(answer.header.text)
        replica = await program.train(plan, node, replica, step, step + 1)
    return replica, told


def _ordered(transport: ZmqTransport, job: int) -> dict[str, Any]:
    expected = _EXPECTED[_ORDERED]
    plan, rank = expected.plan, transport.rank
    engine = ProcessEngine(transport, 2, evaluate=plan.task.gradients, timeout_s=20, job=job)
    found: dict[str, Any] = {}
    if rank < SERVER:
        replica = plan.initial_replicas()[rank]
        if rank == HOSTILE:
            result = engine.run(lambda node: ordering(node, plan, replica))
            assert result is not None
            own, found["told"] = result[0], sorted(set(result[1]))
            found["num_told"] = len(result[1])
        else:
            trained = engine.run(lambda node: program.train(plan, node, replica, 0, STEPS))
            assert trained is not None
            own = trained
        found["is_expected"] = torch.equal(own.params, expected.params[rank])
        found["unread"] = len(engine.unread.inbox), engine.unread.nbytes
    else:
        role = OtherRole(plan, rank)
        engine.run(role.program(Segment(0, STEPS)))
        keep = role.memory
        found["open"] = len(keep.get("boxes", ())), len(keep.get("passed", ()))
        found["kept"] = sorted(
            [exchange[0], state["residual"].nbytes]
            for exchange, state in keep.get("kept", {}).items()
        )
    return found


# Servers that answer nonsense.


def answers(shard: Tensor) -> dict[str, Message]:
    """What no worker takes for a model, by what is wrong with it."""
    good = AnswerHeader(1, True, 0, True)
    change = replace(good, is_whole=False)
    return {
        "no header": shard,
        "another header": Framed(PushHeader(0, 0, 1, 0, True), shard),
        "no model": Framed(good),
        "too short": Framed(good, shard[:-1].clone()),
        "too long": Framed(good, torch.cat([shard, shard])),
        "another shape": Framed(good, shard.reshape(1, -1)),
        "another dtype": Framed(good, shard.float()),
        "no payload": Framed(change, torch.zeros(5, dtype=torch.uint8)),
        "no change": Framed(change, torch.zeros(0)),
        "a step that is not": Framed(replace(change, clock=-(1 << 40)), shard),
        "an order": Framed(Membership(HONEST, False, 9.0)),
    }


def _betrayed(transport: ZmqTransport, jobs: Iterator[int]) -> dict[str, str]:
    """How workers end whose servers answer so; by what they answer, and whether compressed."""
    found, rank = {}, transport.rank
    for case in _BETRAYED:
        plan, how = _EXPECTED[case].plan, case[-1]
        shard = plan.shards()[0]
        model = torch.zeros(shard.stop - shard.start, dtype=torch.float64)
        for what, message in answers(model).items():
            job = next(jobs)
            if rank == SCHEDULER:
                continue
            settings: dict[str, Any] = {"timeout_s": 10, "job": job}
            engine = ProcessEngine(transport, 2, evaluate=plan.task.gradients, **settings)
            if rank >= SERVER:
                engine.run(lambda node, message=message: _betray(node, message), serves=False)
                continue
            replica = plan.initial_replicas()[rank]
            try:
                engine.run(lambda node, p=plan, r=replica: program.train(p, node, r, 0, STEPS))
                found[f"{what}, {how}"] = "nothing"
            except Exception as error:
                found[f"{what}, {how}"] = f"{type(error).__name__}: {error}"
    return found


async def _betray(node: Node, message: Message) -> None:
    for _ in range(2):
        rank, _ = await node.recv_any(REQUEST)
        await _say(node, rank, ANSWER, message)
