"""Collectives through servers: the results of an all-reduce, in the time and bytes it must take."""

import warnings
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.architecture import ARCHITECTURE
from gradwire.compression import COMPRESSION
from gradwire.core.codec import Codec, Kind
from gradwire.core.errors import GradwireWarning, PeerLost, WireError
from gradwire.core.group import Group
from gradwire.core.key import Key
from gradwire.core.lifted import lift
from gradwire.core.node import Framed, Node
from gradwire.core.notation import notation_name
from gradwire.core.reducer import Reduced
from gradwire.core.spec import Spec
from gradwire.core.wire import HEADER_NBYTES, REQUEST
from gradwire.runtime.network import Network
from gradwire.runtime.virtual import VirtualEngine

LATENCY_S, BANDWIDTH = 50e-6, 1.25e9  # of a uniform network


def run(
    architecture: str,
    size: int,
    work: Callable[[Group], Coroutine[Any, Any, Any]],
    keeps: list[dict] | None = None,
    **faults: Any,
) -> tuple[list[Any], VirtualEngine]:
    """What each of `size` workers gets."""
    chosen = ARCHITECTURE.parse(architecture)
    keeps = [{} for _ in range(chosen.num_others)] if keeps is None else keeps

    def daemon(number: int) -> Callable[[Node], Any]:
        return lambda node: chosen.daemon(node, keeps[number])

    def program(node: Node) -> Any:
        return work(chosen.group(node, "x"))

    engine = VirtualEngine(Network.uniform(size + chosen.num_others), size, **faults)
    daemons = [daemon(number) for number in range(chosen.num_others)]
    return engine.run([program] * size, daemons), engine


class First:
    """A job: everyone gets the first one's message."""

    def run(self, messages: Sequence[Tensor], state: Any) -> tuple[Tensor, Any]:
        return messages[0], None


def vector(rank: int, numel: int, step: int = 0) -> Tensor:
    return Key(5).at(step).private(rank).normal(numel)


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("size", range(1, 18))
def test_every_collective_is_that_of_an_all_reduce(size, servers) -> None:
    async def work(group: Group) -> list[Any]:
        x = vector(group.rank, 10)
        return [
            await group.mean(x),
            await group.max(x[:2]),
            await group.all_gather(x[: group.rank]),
            await group.all_to_all([x[peer % 10] * (peer + 1) for peer in range(group.size)]),
            await group.reduce_tree(x, torch.sub, lambda x: x / 3),
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


COMPRESSIONS = [text for cls in COMPRESSION for text in (cls.examples or (notation_name(cls),))]


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
    return run(architecture, size, work, keeps)[0], keeps


def alone(text: str) -> bool:
    """Whether it can be used as it is written."""
    compression = COMPRESSION.parse(text)
    return not isinstance(compression, Codec) or (
        compression.takes is Kind.REAL and not compression.needs_feedback
    )


@pytest.mark.parametrize("text", [text for text in COMPRESSIONS if alone(text)])
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
    owed = torch.cat([keep["x", 1]["residual"] for keep in keeps[:servers]])
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

    with pytest.raises(WireError, match="expected an order"):
        run("parameter_server", 1, work)


def test_a_server_refuses_vectors_that_cannot_be_added() -> None:
    async def work(group: Group) -> None:
        await group.mean(vector(group.rank, 4 + group.rank))

    with pytest.raises(WireError, match="all workers must send the same"):
        run("parameter_server", 2, work)


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
