"""Collectives through servers: the results of an all-reduce, in the time and bytes it must take."""

import re
import warnings
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from gradwire.architecture import ARCHITECTURE
from gradwire.architecture.parameter_server import _collective, _orders
from gradwire.architecture.parameter_server._orders import Maximum, MergeInPairs, Order
from gradwire.compression import COMPRESSION
from gradwire.compression.sparsification.topk import TopK
from gradwire.core.codec import Codec, Kind
from gradwire.core.coded import MeanOfCoded, MeanOfReceived, MergeOfCoded
from gradwire.core.errors import GradwireWarning, NonFiniteError, PeerLost, WireError
from gradwire.core.group import Group
from gradwire.core.key import Key
from gradwire.core.lifted import lift
from gradwire.core.limits import Limits
from gradwire.core.node import Framed, Membership, Node
from gradwire.core.notation import notation_name
from gradwire.core.reducer import Reduced
from gradwire.core.spec import Spec
from gradwire.core.wire import ANSWER, HEADER_NBYTES, REQUEST
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.engine import VirtualEngine
from sampling import cover, sizes

LATENCY_S, BANDWIDTH = 50e-6, 1.25e9  # of a uniform network


def run(
    architecture: str,
    size: int,
    work: Callable[[Group], Coroutine[Any, Any, Any]],
    keeps: list[dict] | None = None,
    limits: Limits | None = None,
    **faults: Any,
) -> tuple[list[Any], VirtualEngine]:
    """What each of `size` workers gets."""
    chosen = ARCHITECTURE.parse(architecture)
    keeps = [{} for _ in range(chosen.num_others)] if keeps is None else keeps

    def daemon(number: int) -> Callable[[Node], Any]:
        return lambda node: chosen.daemon(node, keeps[number], limits)

    def program(node: Node) -> Any:
        return work(chosen.group(node, "x"))

    engine = VirtualEngine(Network.uniform(size + chosen.num_others), size, **faults)
    daemons = [daemon(number) for number in range(chosen.num_others)]
    return engine.run([program] * size, daemons), engine


@dataclass(frozen=True)
class First:
    """A job: everyone gets the first one's message."""

    def run(self, messages: Sequence[Tensor], state: Any) -> tuple[Tensor, Any]:
        return messages[0], None


@dataclass(frozen=True)
class Differences:
    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        return a - b

    def finalize(self, merged: Tensor) -> Tensor:
        return merged / 3


def vector(rank: int, numel: int, step: int = 0) -> Tensor:
    return Key(5).at(step).private(rank).normal(numel)


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("size", sizes(range(1, 18)))
def test_every_collective_is_that_of_an_all_reduce(size, servers) -> None:
    async def work(group: Group) -> list[Any]:
        x = vector(group.rank, 10)
        return [
            await group.mean(x),
            await group.max(x[:2]),
            await group.all_gather(x[: group.rank]),
            await group.all_to_all([x[peer % 10] * (peer + 1) for peer in range(group.size)]),
            await group.reduce_tree(x, Differences()),
        ]

    through, _ = run(f"parameter_server({servers})", size, work)
    direct, _ = run("allreduce", size, work)
    for own, expected in zip(through, direct):
        for result, wanted in zip(own, expected):
            for a, b in zip(result, wanted, strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("size", [2, 5])
def test_some_of_the_workers_can_be_a_group(size) -> None:
    async def program(node: Node) -> Any:
        if node.rank == 0:
            return None
        group = chosen.group(node, "x", range(1, size))
        return await group.mean(vector(node.rank, 7)), await group.all_gather(vector(node.rank, 3))

    chosen = ARCHITECTURE.parse("parameter_server(2)")
    engine = VirtualEngine(Network.uniform(size + 3), size)
    daemons = [lambda node: chosen.daemon(node, {})] * 3
    _, *results = engine.run([program] * size, daemons)
    expected = sum(vector(rank, 7) for rank in range(1, size)) / (size - 1)
    for mean, gathered in results:
        torch.testing.assert_close(mean, expected)
        assert [x.tolist() for x in gathered] == [
            vector(rank, 3).tolist() for rank in range(1, size)
        ]


@pytest.mark.parametrize(
    ("size", "servers"), [(2, 1), (5, 1), (16, 1), (2, 2), (8, 2), (6, 3), (16, 4)]
)
def test_a_mean_takes_the_time_of_the_formula(size, servers) -> None:
    numel = 12 * 1024

    async def work(group: Group) -> None:
        await group.mean(vector(group.rank, numel))

    _, engine = run(f"parameter_server({servers})", size, work)
    nbytes = 4 * numel + servers * HEADER_NBYTES
    expected = 2 * (LATENCY_S + size * nbytes / (servers * BANDWIDTH))
    assert engine.now == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_the_ledger_counts_messages_and_headers(servers) -> None:
    async def work(group: Group) -> None:
        await group.mean(vector(group.rank, 100))
        await group.all_gather(vector(group.rank, 10))
        await group.at_owner(vector(group.rank, 1), First())

    size = 4
    _, engine = run(f"parameter_server({servers})", size, work)
    mean = 2 * size * (400 + servers * HEADER_NBYTES)
    gather = size * (40 + HEADER_NBYTES) * (1 + size - 1)  # up once, down to all others
    one = 2 * size * (4 + HEADER_NBYTES)
    assert engine.ledger.total_bytes == mean + gather + one
    # Workers do not talk to each other.
    links = engine.ledger.link_bytes
    assert all(links[a][b] == 0 for a in range(size) for b in range(size))


def test_every_tensor_has_its_server() -> None:
    chosen = ARCHITECTURE.parse("parameter_server(3)")
    node = Node(0, 4)
    owners = {chosen.group(node, f"layer {i}")._one_server() for i in range(20)}
    assert owners == {4, 5, 6}


COMPRESSIONS = [
    (text, cls) for cls in COMPRESSION for text in (cls.examples or (notation_name(cls),))
]


def averaged(
    architecture: str, text: str, size: int, numel: int, steps: int = 2, seed: int = 8
) -> tuple[list[list[Reduced]], list[dict]]:
    """[rank][step], and what servers keep."""
    reducer = lift(COMPRESSION.parse(text), 10.0)
    chosen = ARCHITECTURE.parse(architecture)
    keeps: list[dict] = [{} for _ in range(chosen.num_others)]

    async def work(group: Group) -> list[Reduced]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GradwireWarning)
            state = reducer.init(Spec((numel,), torch.float32), size)
        results = []
        for step in range(steps):
            again = chosen.group(group.node, "x")
            key = Key(seed).at(step).private(group.rank)
            results.append(await reducer.mean(vector(group.rank, numel, step), state, key, again))
            state = results[-1].state
        return results

    # Each step in a run of its own would lose the states of the workers, not those of servers.
    # No compression needs more than the size of the tensor allows.
    limits = Limits({"x": numel}, itemsize=4)
    return run(architecture, size, work, keeps, limits)[0], keeps


def alone(text: str) -> bool:
    """Whether it can be used as it is written."""
    compression = COMPRESSION.parse(text)
    return not isinstance(compression, Codec) or (
        compression.traits.takes is Kind.REAL and not compression.traits.needs_feedback
    )


@pytest.mark.few(14)
@pytest.mark.parametrize("text", cover(case for case in COMPRESSIONS if alone(case[0])))
def test_every_compression_goes_through_servers(text) -> None:
    first, other = (averaged("allreduce", text, 3, 120, seed=seed)[0] for seed in (8, 9))
    is_random = any(not torch.equal(a.mean, b.mean) for a, b in zip(first[0], other[0]))
    through, keeps = averaged("parameter_server", text, 3, 120)
    squeezed, _ = averaged('parameter_server(2, answers="compressed")', text, 3, 120)
    sharded, _ = averaged("parameter_server(2)", text, 3, 120)
    for results in (through, sharded, squeezed):
        for steps in results:
            for step, result in enumerate(steps):
                assert torch.equal(result.mean, results[0][step].mean)
                assert result.mean.shape == (120,)
                assert torch.isfinite(result.mean).all()
    # Where servers encode the mean again, their shards are others than those of n workers.
    if not is_random and not keeps[0]:
        for step, expected in enumerate(first[0]):
            torch.testing.assert_close(through[0][step].mean, expected.mean)


def test_without_compression_all_answers_are_exact() -> None:
    first, _ = averaged("allreduce", "identity", 5, 120)
    for servers in (1, 2, 3):
        for answers in ("dense", "compressed"):
            text = f'parameter_server({servers}, answers="{answers}")'
            through, _ = averaged(text, "identity", 5, 120)
            assert torch.equal(through[0][1].mean, first[0][1].mean)


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize(
    ("text", "answers"),
    [
        ("doublesqueeze(sign)", "dense"),
        ("ef(topk(0.05))", "compressed"),
        ("ef(sign)", "compressed"),
    ],
)
def test_feedback_of_workers_and_servers_loses_nothing(text, answers, servers) -> None:
    size, numel, steps = 4, 60, 5
    architecture = f'parameter_server({servers}, answers="{answers}")'
    results, keeps = averaged(architecture, text, size, numel, steps)
    applied = sum(result.mean for result in results[0])
    left = sum(own[-1].state["residual"] for own in results) / size
    owed = torch.cat(
        [keep["kept"]["x", 1, tuple(range(size))]["residual"] for keep in keeps[:servers]]
    )
    gradients = sum(vector(r, numel, s) for r in range(size) for s in range(steps)) / size
    assert owed.norm() > 0.1
    torch.testing.assert_close(applied + left + owed, gradients, rtol=1e-4, atol=1e-5)


def test_what_servers_owe_survives_the_end_of_a_segment() -> None:
    reducer = lift(COMPRESSION.parse("doublesqueeze(sign)"))
    chosen = ARCHITECTURE.parse("parameter_server(2)")

    def trained(segments: list[range]) -> Tensor:
        keeps: list[dict] = [{} for _ in range(3)]
        states = [reducer.init(Spec((50,), torch.float32), 3)] * 3
        daemons = [lambda node: chosen.daemon(node, keeps[node.rank - 3])] * 3
        engine = VirtualEngine(Network.uniform(6), 3)
        for steps in segments:

            async def program(
                node: Node, steps: range = steps, states: list[Any] = states
            ) -> tuple[Tensor, Any]:
                state = states[node.rank]
                for step in steps:
                    key = Key(8).at(step).private(node.rank)
                    group = chosen.group(node, "x")
                    x = vector(node.rank, 50, step)
                    reduced = await reducer.mean(x, state, key, group)
                    state = reduced.state
                return reduced.mean, state

            results = engine.run([program] * 3, daemons)
            states = [state for _, state in results]
        return results[0][0]

    assert torch.equal(trained([range(6)]), trained([range(2), range(2, 5), range(5, 6)]))


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("how", ["mean", "max", "all_gather", "at_owner"])
def test_a_dead_worker_is_reported_to_those_that_wait(how, servers) -> None:
    async def work(group: Group) -> Any:
        await group.mean(vector(group.rank, 4))
        if group.rank == 2:
            await group.node.sleep(10.0)
        x = vector(group.rank, 4)
        try:
            return await (
                group.at_owner(x, First()) if how == "at_owner" else getattr(group, how)(x)
            )
        except PeerLost as error:
            return error

    architecture = f"parameter_server({servers})"
    results, _ = run(architecture, 4, work, faults=["crash(2, at=1.0)"], heartbeat_s=0.5)
    assert results[2] is None
    for rank in (0, 1, 3):
        assert isinstance(results[rank], PeerLost)
        assert results[rank].rank == 2
        assert str(results[rank]) == "rank 2 crashed at 1 s, which was noticed at 1.5 s"


def test_a_worker_that_comes_to_a_mean_after_another_was_lost_is_told_at_once() -> None:
    async def work(group: Group) -> Any:
        await group.node.sleep(10.0 if group.rank == 2 else 3.0)
        try:
            return await group.mean(vector(group.rank, 4))
        except PeerLost as error:
            return error.rank

    results, engine = run("parameter_server", 3, work, faults=["crash(2, at=1.0)"])
    assert results == [2, 2, None]
    assert engine.now == pytest.approx(3.0, abs=1e-3)


@pytest.mark.parametrize(
    "message", [torch.zeros(3), Framed(None, torch.zeros(3)), Framed("mean", torch.zeros(3))]
)
def test_a_server_refuses_what_is_no_order(message) -> None:
    async def work(group: Group) -> None:
        if isinstance(message, Framed):
            await group.node.send_framed(1, REQUEST, message, HEADER_NBYTES)
        else:
            await group.node.send(1, REQUEST, message)

        return await group.at_owner(torch.ones(2), First())

    with pytest.warns(GradwireWarning, match=r"expected an order; it was dropped"):
        results, _ = run("parameter_server", 1, work)
    assert results[0].tolist() == [1, 1]


def test_no_worker_tells_a_server_who_is_there() -> None:
    async def work(group: Group) -> Any:
        if group.rank == 0:
            news = Framed(Membership(1, False, 0.0))
            await group.node.send_framed(group.size, REQUEST, news, HEADER_NBYTES)
        return await group.mean(torch.ones(3))

    with pytest.warns(GradwireWarning, match="got a Membership from rank 0"):
        results, _ = run("parameter_server", 2, work)
    assert [result.tolist() for result in results] == [[1, 1, 1]] * 2


@dataclass(frozen=True)
class Breaks:
    """A job that cannot be done."""

    error: Exception

    def run(self, messages: Sequence[Tensor], state: Any) -> tuple[Tensor, Any]:
        raise self.error


def after_an_error(size: int, exchange: Callable[[Group], Coroutine[Any, Any, Any]]) -> list[str]:
    """The errors that workers see in an exchange, after which the server still forms means."""

    async def work(group: Group) -> str:
        text = ""
        try:
            await exchange(group)
        except (ValueError, RuntimeError) as error:
            text = f"{type(error).__name__}: {error}"
        mean = await group_of(group.node, "after").mean(torch.ones(2))
        assert mean.tolist() == [1, 1]
        return text

    group_of = ARCHITECTURE.parse("parameter_server").group
    return run("parameter_server", size, work)[0]


def test_vectors_that_cannot_be_added() -> None:
    errors = after_an_error(2, lambda group: group.mean(vector(group.rank, 4 + group.rank)))
    assert len(set(errors)) == 1
    assert errors[0].startswith("WireError: a server got (5,) torch.float32")
    assert errors[0].endswith("all workers must send the same")
    errors = after_an_error(2, lambda group: group.mean(torch.ones(2, dtype=torch.int64)))
    assert errors == ["WireError: a server got torch.int64, of which there is no mean"] * 2


@pytest.mark.parametrize("error", [NonFiniteError("x"), ValueError("x"), WireError("x")])
def test_errors_of_a_job_reach_all_members(error) -> None:
    errors = after_an_error(3, lambda group: group.at_owner(torch.ones(2), Breaks(error)))
    assert errors == [f"{type(error).__name__}: x"] * 3


def test_whatever_happens_in_a_job() -> None:
    errors = after_an_error(2, lambda group: group.at_owner(torch.ones(2), Breaks(KeyError("x"))))
    assert errors == ["RuntimeError: KeyError: 'x'"] * 2


def test_members_that_order_different_jobs() -> None:
    def exchange(group: Group) -> Any:
        job = First() if group.rank else Maximum()
        return group.at_owner(torch.ones(2), job)

    errors = after_an_error(3, exchange)
    assert len(set(errors)) == 1
    assert "the members of (0, 1, 2) ordered different jobs for 'x', round 1" in errors[0]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"members": (0, 1, 7)}, "an exchange among .* there are workers 0 .. 1"),
        ({"members": (0, 0, 1)}, "an exchange among .* there are workers 0 .. 1"),
        ({"members": (0,)}, "an exchange among .* of which it is none"),
        ({"members": ()}, "an exchange among .* of which it is none"),
        ({"to": (0,)}, "neither a job nor that something is handed on, or both"),
        ({"to": (1,)}, r"handed on to \(1,\), not to others"),
        ({"job": None}, "neither a job"),
        ({"job": None, "to": (5,)}, r"handed on to \(5,\), not to others"),
        ({"job": None, "to": (0, 0)}, r"handed on to \(0, 0\), not to others"),
        (
            {"job": MeanOfReceived(TopK(0.1), Spec((2**20, 2**20), torch.float32), Key(0), ())},
            "limit",
        ),
        ({"job": MergeInPairs(MergeOfCoded(TopK(0.1), Spec((-1,), torch.float32), 1))}, "limit"),
        ({}, "no tensor with an order"),
    ],
)
def test_orders_that_a_server_does_not_obey(changes, why) -> None:
    order = replace(Order("x", 1, (0, 1), First()), **changes)
    # Who sends something to hand on waits for what others have handed on.
    tag = ("x", 1, 0) if order.job is None else ("x", 1)

    async def exchange(group: Group) -> None:
        if group.rank == 1:
            framed = Framed(order, torch.ones(2) if changes else None)
            await group.node.send_framed(group.size, REQUEST, framed, HEADER_NBYTES)
            await group._answer(group.size, tag)  # type: ignore[attr-defined]

    errors = after_an_error(2, exchange)
    assert errors[0] == ""
    assert re.search(why, errors[1])


def test_a_member_that_does_not_wait_for_its_turn() -> None:
    async def exchange(group: Group) -> None:
        if group.rank == 1:
            for _ in range(2):
                framed = Framed(Order("y", 1, (0, 1), First()), torch.ones(2))
                await group.node.send_framed(group.size, REQUEST, framed, HEADER_NBYTES)
            await group._answer(group.size, ("y", 1))  # type: ignore[attr-defined]

    assert "'y', round 1, out of turn" in after_an_error(2, exchange)[1]


def test_nobody_fills_a_server_with_exchanges_that_it_begins() -> None:
    """Others still form means there."""
    group_of = ARCHITECTURE.parse("parameter_server").group

    async def work(group: Group) -> str:
        if group.rank > 0:
            await group.node.sleep(1.0)
            mean = await group_of(group.node, "z", (1, 2)).mean(torch.ones(2))
            return str(mean.tolist())
        for number in range(7):
            framed = Framed(Order(f"y {number}", 1, (0, 1), First()), torch.ones(2))
            await group.node.send_framed(group.size, REQUEST, framed, HEADER_NBYTES)
        with pytest.raises(WireError) as caught:
            await group._answer(group.size, ("y 6", 1))  # type: ignore[attr-defined]
        return str(caught.value)

    with patch.object(_collective, "_MAX_EXCHANGES", 6):
        results, _ = run("parameter_server", 3, work)
    assert results == ["rank 0 waits for 6 exchanges at one server", "[1.0, 1.0]", "[1.0, 1.0]"]


# What a hostile member sends to a server of a job whose only tensor, "x", has 1000 elements.

LIMITS = Limits({"x": 1000, "nonfinite": 1, "honest": 4}, itemsize=4)
EVERYONE = (0, 1, 2)


def squeezing(numel: int, members: tuple[int, ...], **spec: Any) -> MeanOfCoded:
    """A job after which a server keeps a residual of so many elements."""
    return MeanOfCoded(
        TopK(0.01), Spec((numel,), torch.float32, **spec), Key(0), members, Key(1), True
    )


def merging(numel: int) -> MergeInPairs:
    return MergeInPairs(MergeOfCoded(TopK(0.1), Spec((numel,), torch.float32), 3))


def holding_tensor(stop: int, shape: tuple[int, ...]) -> MeanOfCoded:
    return squeezing(1000, EVERYONE, tensors=(("", 0, stop, shape),))


def kept_by(keep: dict) -> int:
    """Bytes of all tensors that a server stores."""
    stack, nbytes = [keep], 0
    while stack:
        value = stack.pop()
        if isinstance(value, Tensor):
            nbytes += value.nbytes
        elif isinstance(value, dict):
            stack += value.values()
        elif isinstance(value, tuple | list):
            stack += value
    return nbytes


def hostile(orders: Sequence[tuple[Order, Tensor]]) -> tuple[list[str], dict]:
    """What rank 1 is told about its orders, and what the server then stores.

    All form means before and after.
    """

    async def work(group: Group) -> list[str]:
        honest = ARCHITECTURE.parse("parameter_server").group(group.node, "honest")
        await honest.mean(torch.ones(4))
        if group.rank != 1:
            return [str((await honest.mean(torch.ones(4))).tolist())]
        told = []
        for order, message in orders:
            framed = Framed(order, message)
            await group.node.send_framed(group.size, REQUEST, framed, HEADER_NBYTES)
            tag = (order.label, order.round) if order.job else (order.label, order.round, 0)
            got = await group.node.recv_within((ANSWER, *tag), 0.001)
            told.append("" if got is None else got[1].header.text)
        await honest.mean(torch.ones(4))
        return told

    keeps: list[dict] = [{}, {}]
    results, _ = run("parameter_server", 3, work, keeps, LIMITS)
    assert results[0] == results[2] == ["[1.0, 1.0, 1.0, 1.0]"]
    return results[1], keeps[0]


def test_a_short_payload_makes_a_server_keep_nothing_large() -> None:
    """2**28 elements are 1 GiB, from a payload of a few bytes, by an order among itself alone."""
    short = torch.zeros(18, dtype=torch.uint8)
    alone = [(Order("x", r, (1,), squeezing(2**28, (1,))), short) for r in range(20)]
    told, keep = hostile(alone)
    assert all("an exchange among (1,), but all exchanges of this job" in text for text in told)
    assert kept_by(keep) == 0
    together = [(Order("x", 7, EVERYONE, squeezing(2**28, EVERYONE)), short)]
    told, keep = hostile(together)
    assert "a job on a tensor [268435456] torch.float32, but 'x' has 1000 elements" in told[0]
    assert kept_by(keep) == 0


@pytest.mark.parametrize(
    ("order", "message", "why"),
    [
        (Order("w", 1, EVERYONE, Maximum()), torch.ones(1), "'w' is no tensor that this job"),
        (Order("w", 1, EVERYONE, None, (0, 2)), torch.ones(1), "'w' is no tensor that this job"),
        (Order("x", 1, (1, 2), Maximum()), torch.ones(1), "among its 3 workers"),
        (Order("x", 1, (2, 1, 0), Maximum()), torch.ones(1), "among its 3 workers"),
        (Order("x", 1, EVERYONE, Maximum()), torch.ones(40_000), "at most 128000 are accepted"),
        (Order("nonfinite", 1, EVERYONE, Maximum()), torch.ones(20_000), "at most 65536 are"),
        (Order("x", 1, EVERYONE, merging(1001)), torch.ones(1), "has 1000 elements"),
        (Order("x", 1, EVERYONE, holding_tensor(1 << 40, (1 << 40,))), torch.ones(1), "limit of"),
        (Order("x", 1, EVERYONE, holding_tensor(9, (3, 1 << 40))), torch.ones(1), "limit of"),
    ],
)
def test_orders_that_have_no_place_in_a_job(order, message, why) -> None:
    told, keep = hostile([(order, message)])
    assert told[0].startswith(("an order of rank 1 is refused: ", "rank 1 ordered"))
    assert why in told[0]
    assert not keep["boxes"]
    assert kept_by(keep) == 0


def test_one_exchange_of_a_tensor_at_a_time() -> None:
    """Rank 1 begins rounds that nobody else begins: one stays open, others are refused."""
    orders = [(Order("x", 100 + r, EVERYONE, Maximum()), torch.ones(1000)) for r in range(50)]
    told, keep = hostile([*orders, (Order("x", 7, EVERYONE, None, (0, 2)), torch.ones(1000))])
    assert told[0] == ""
    assert all("out of turn" in text for text in told[1:])
    assert kept_by(keep) == 4000


def test_one_hand_on_of_a_tensor_at_a_time() -> None:
    """Nor are the inboxes of others filled by what a server hands on."""
    orders = [(Order("x", 9, EVERYONE, None, (0, 2)), torch.ones(1000)) for _ in range(3)]
    orders += [(Order("x", 10 + r, EVERYONE, None, (0,)), torch.ones(1000)) for r in range(9)]
    told, keep = hostile(orders)
    assert told[0] == ""
    assert all("out of turn" in text for text in told[1:])
    assert sum(sum(counts.values()) for counts in keep["passed"].values()) == 2


def test_what_is_kept_is_bounded_by_the_tensor() -> None:
    """The only worker of a job goes through as many rounds as it likes."""
    x, keeps = torch.ones(1000), [{}, {}]
    codec, key = TopK(0.01), Key(0)
    payload = codec.encode(x, codec.init(Spec.of(x)), key.private(0))[0].buffer

    async def work(group: Group) -> None:
        for _ in range(100):
            await group.at_owner(payload, squeezing(1000, (0,)))

    with pytest.raises(WireError, match="at most 128000 are kept"):
        run("parameter_server", 1, work, keeps, Limits({"x": 1000}, itemsize=4))
    assert len(keeps[0]["kept"]) == 25
    assert kept_by(keeps[0]) == 25 * 4000


def test_groups_do_not_share_what_is_kept() -> None:
    """A worker that orders the same for itself changes nothing of what all are owed."""
    x = vector(0, 50)

    async def work(group: Group) -> None:
        chosen = ARCHITECTURE.parse("parameter_server").group
        reducer = lift(COMPRESSION.parse("doublesqueeze(topk(0.1))"))
        for members in (None, (group.node.rank,)):
            state, key = reducer.init(Spec.of(x), 2), Key(3).private(group.node.rank)
            own = chosen(group.node, "x", members)
            await reducer.mean(vector(group.node.rank, 50), state, key, own)
            if members is None:
                before.append(keeps[0]["kept"]["x", 1, (0, 1)]["residual"].clone())

    keeps: list[dict] = [{}, {}]
    before: list[Tensor] = []
    run("parameter_server", 2, work, keeps)
    assert set(keeps[0]["kept"]) >= {("x", 1, (0, 1)), ("x", 1, (0,)), ("x", 1, (1,))}
    assert torch.equal(keeps[0]["kept"]["x", 1, (0, 1)]["residual"], before[0])


def test_handed_on_messages_of_long_ago_are_forgotten() -> None:
    async def work(group: Group) -> list[Any]:
        return [await group.all_gather(torch.tensor([group.rank])) for _ in range(9)]

    keeps: list[dict] = [{}, {}]
    with patch.object(_collective, "_MAX_EXCHANGES", 3):
        results, _ = run("parameter_server", 2, work, keeps)
    assert all(torch.cat(one).tolist() == [0, 1] for result in results for one in result)
    assert len(keeps[0]["passed"]) == 3


def test_answers_that_cannot_be_means() -> None:
    def wrong(messages: tuple[Tensor, ...], count: int) -> Tensor:
        return torch.zeros(3)

    with patch.object(_orders, "mean_in_order", wrong):
        for result in run("parameter_server", 2, failing_mean)[0]:
            assert result == "an answer of (3,) torch.float32, expected (4,) torch.float32"


async def failing_mean(group: Group) -> str:
    with pytest.raises(WireError) as caught:
        await group.mean(torch.ones(4))
    return str(caught.value)


def test_errors_and_notation() -> None:
    with pytest.raises(ValueError, match="servers must be at least 1, got 0"):
        ARCHITECTURE.parse("parameter_server(0)")
    with pytest.raises(ValueError, match="servers must be at most 1024, got 1025"):
        ARCHITECTURE.parse("parameter_server(1025)")
    with pytest.raises(ValueError, match="optimizer"):
        ARCHITECTURE.parse('parameter_server(optimizer="nobody")')
    with pytest.raises(ValueError, match="answers"):
        ARCHITECTURE.parse('parameter_server(answers="short")')
    chosen = ARCHITECTURE.parse("parameter_server(2)")
    assert (chosen.num_servers, chosen.num_others, chosen.offers) == (2, 3, ("mean", "push_pull"))
