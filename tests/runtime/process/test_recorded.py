"""Every effect, recorded on threads and replayed; and orders that do not fit."""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire.core.errors import PeerLost
from gradwire.core.node import Framed, Node
from gradwire.runtime.process.engine import ProcessEngine
from gradwire.runtime.process.transport import DONE, LOST, Arrival
from gradwire.runtime.replay.engine import ReplayEngine
from gradwire.runtime.replay.order import (
    EventOrder,
    OrderEntry,
    OrderError,
    Recorder,
    RunOrder,
    load,
)
from runtime.process.test_engine import transports

Program = Callable[[Node], Any]


def twice(requests: Sequence[Any]) -> list[Any]:
    return [2 * request for request in requests]


NUM_LAYERS = 3


def twice_by_layer(
    request: Any,
    on_layer: Callable[[int, Any], None],
    before_layer: Callable[[int], None] | None = None,
) -> None:
    """Twice a vector with an element for each layer, of which the last is there first."""
    if before_layer is not None:
        before_layer(NUM_LAYERS - 1)
    result = torch.full_like(request, float("nan"))
    for layer in reversed(range(NUM_LAYERS)):
        result[layer] = 2 * request[layer]
        on_layer(layer, result)


class Recorded:
    """Runs of programs on threads, with what they recorded."""

    def __init__(self, folder: Path, size: int, num_workers: int | None = None) -> None:
        self.size, self.num_workers = size, num_workers or size
        self.paths = [folder / f"order-{rank}" for rank in range(size)]
        self.logs = [
            Recorder(path, rank, size, self.num_workers, "test")
            for rank, path in enumerate(self.paths)
        ]
        self.engines = [
            ProcessEngine(
                end,
                self.num_workers,
                evaluate=twice,
                evaluate_layers=twice_by_layer,
                timeout_s=10,
                log=log,
            )
            for end, log in zip(transports(size), self.logs)
        ]

    def run(self, programs: Sequence[Program]) -> list[Any]:
        results: list[Any] = [None] * self.size

        def one(rank: int) -> None:
            results[rank] = self.engines[rank].run(programs[rank])

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        return results[: self.num_workers]

    @property
    def orders(self) -> list[EventOrder]:
        for log in self.logs:
            log.close()
        return [load(path) for path in self.paths]


def test_every_effect(tmp_path: Path) -> None:
    async def child(node: Node, seen: list[Any], name: str) -> str:
        for _ in range(2):
            seen.append(name)
            await node.sleep(0.002)
        return name

    async def worker(node: Node) -> tuple[list[Any], float]:
        seen: list[Any] = []
        tasks = [await node.spawn(child(node, seen, name)) for name in "ab"]
        for step in range(5):
            doubled = await node.compute(torch.tensor([float(step + node.rank)]))
            await node.send_framed(2, "request", Framed(step, doubled), 8, "request")
            if step % 2:
                await node.sleep(0.001 * node.rank)
            answer = await node.recv(2, ("answer", step))
            seen.append(float(answer))
        seen.append(await node.recv_within("nothing", 0.003))
        seen.append(await node.recv_within("nothing", 0.0))
        await node.send(node.rank, "own", torch.ones(2))
        seen.append((await node.recv_any("own"))[0])
        now = await node.now()
        seen += [now, await node.members()]
        seen += [await node.join(task) for task in (*tasks, tasks[0])]
        seen.append(await node.call(len, "four"))
        seen.append(await node.native_mean(torch.ones(1), [], ""))
        return seen, now

    def server() -> Program:
        async def program(node: Node) -> None:
            total = torch.zeros(1)  # the order of the workers matters
            await node.watch("watched")
            while True:
                rank, message = await node.recv_any("request")
                total = total * 0.5 + message.data
                await node.send(rank, ("answer", message.header), total, "answer")

        return program

    recorded = Recorded(tmp_path, 3, 2)
    results = [recorded.run([worker, worker, server()]) for _ in range(2)]  # two runs of an engine
    again = ReplayEngine(recorded.orders, evaluate=twice)
    assert [again.run([worker, worker], [server()]) for _ in range(2)] == results
    for rank, engine in enumerate(recorded.engines):
        assert again.ledger.link_bytes[rank] == engine.ledger.link_bytes[rank]
        assert again.ledger.link_messages[rank] == engine.ledger.link_messages[rank]
    assert again.now >= max(now for _, now in results[1])
    with pytest.raises(OrderError, match="has 2 runs; this is number 3"):
        again.run([worker, worker], [server()])


@pytest.mark.parametrize("seed", range(4))
def test_programs_that_do_anything(seed: int, tmp_path: Path) -> None:
    """Programs drawn at random, which spawn others, on three nodes that share what they have."""

    async def life(node: Node, state: list[Any], draws: random.Random, depth: int) -> int:
        own = sum(one == "life" for one in state)
        state.append("life")
        for _ in range(30):
            what = draws.randrange(9)
            if what < 3:
                x = torch.tensor([float(len(state)), draws.random()])
                await node.send(draws.randrange(3), draws.choice(("all", 0, 1, 2)), x)
            elif what < 5:
                # Two must not wait for the same, but may look whether it is there.
                tag, seconds = draws.choice((("all", 0.0), (own, 0.0005)))
                found = await node.recv_within(tag, seconds)
                state.append(found if found is None else (found[0], found[1].tolist()))
            elif what == 5:
                state.append(float(await node.compute(torch.tensor([float(len(state))]))))
            elif what == 6:
                await node.sleep(draws.choice((0.0, 0.0003)))
            elif what == 7:
                state.append((await node.now(), await node.members()))
            elif depth:
                child = life(node, state, random.Random(draws.random()), depth - 1)
                task = await node.spawn(child)
                if draws.random() < 0.5:
                    state.append(await node.join(task))
        return len(state)

    def programs(states: list[list[Any]]) -> list[Program]:
        def program(node: Node) -> Any:
            return life(node, states[node.rank], random.Random(f"{seed} {node.rank}"), 2)

        return [program] * 3

    states: list[list[Any]] = [[] for _ in range(3)]
    again: list[list[Any]] = [[] for _ in range(3)]
    recorded = Recorded(tmp_path, 3)
    results = recorded.run(programs(states))
    engine = ReplayEngine(recorded.orders, evaluate=twice)
    assert engine.run(programs(again)) == results
    assert again == states
    assert sum(one.num_effects for one in recorded.engines) == engine.num_effects
    for rank, one in enumerate(recorded.engines):
        assert engine.ledger.link_messages[rank] == one.ledger.link_messages[rank]


def test_gradients_that_come_layer_by_layer(tmp_path: Path) -> None:
    """Each layer's part is exchanged when it is there, and the next gradient may wait for them."""

    async def exchange(node: Node, begun: Any, tag: tuple[int, int]) -> float:
        part = (await node.reach(begun, tag[1]))[tag[1]].clone()
        await node.send_framed(2, "part", Framed(tag, part), 8)
        return float(await node.recv(2, tag))

    async def worker(node: Node) -> list[Any]:
        x = torch.arange(float(NUM_LAYERS)) + node.rank
        begun, seen = await node.begin(x), []
        for step in range(5):
            tasks = []
            for layer in reversed(range(NUM_LAYERS)):
                await node.reach(begun, layer)
                tasks.append(await node.spawn(exchange(node, begun, (step, layer))))
                await node.sleep(0.0003 * node.rank)
            x = torch.zeros(NUM_LAYERS)  # they arrive there
            begun = await node.begin(x, is_open=False)
            for layer, task in enumerate(reversed(tasks)):
                x[layer] = await node.join(task)
                await node.open(begun, layer, x if layer == NUM_LAYERS - 1 else None)
            seen.append(x.tolist())
        return [*seen, (await node.reach(begun, 0)).tolist()]

    async def server(node: Node) -> None:
        total = torch.zeros(1)  # the order of the parts matters
        while True:
            rank, message = await node.recv_any("part")
            total = total * 0.5 + message.data / 4
            await node.send(rank, message.header, total)

    recorded = Recorded(tmp_path, 3, 2)
    results = recorded.run([worker, worker, server])
    orders = recorded.orders
    again = ReplayEngine(orders, evaluate=twice)
    assert again.run([worker, worker], [server]) == results
    kinds = [entry.kind for entry in orders[0].runs[0].entries]
    assert kinds.count("reached") == 5 * 2 * NUM_LAYERS + 1

    async def closed(node: Node) -> None:
        await node.reach(await node.begin(None, is_open=False), 0)

    entries = (OrderEntry(0, "start"), OrderEntry(0, "reached"))
    alone = EventOrder(0, 1, 1, "", (RunOrder(entries, 0.0),))
    with pytest.raises(OrderError, match="parameters of that gradient are not there yet"):
        ReplayEngine([alone], evaluate=twice).run([closed])


def test_peers_that_are_lost(tmp_path: Path) -> None:
    async def program(node: Node) -> list[Any]:
        await node.watch("changes")
        seen = [await node.recv_any("changes"), await node.members()]
        try:
            await node.recv(1, "x")
        except PeerLost as error:
            seen.append(str(error))
        return seen

    path = tmp_path / "order"
    log = Recorder(path, 0, 2, 2)
    end = transports(2)[0]
    engine = ProcessEngine(end, log=log)
    threading.Timer(0.02, end.happen, [Arrival(LOST, 1, message="gone")]).start()
    seen = engine.run(program)
    assert seen is not None
    log.close()
    order = load(path)

    async def gone(node: Node) -> None:
        pass

    started = replace(order, rank=1, runs=(_one_entry(order),))
    assert ReplayEngine([order, started]).run([program, gone])[0] == seen


def _one_entry(order: EventOrder) -> Any:
    run = order.runs[0]
    return run._replace(entries=run.entries[:1])


@pytest.mark.parametrize("by_layer", [False, True])
def test_an_evaluator_that_fails_does_so_again(by_layer: bool, tmp_path: Path) -> None:
    def fail(requests: Sequence[Any]) -> list[Any]:
        raise ArithmeticError("not finite")

    async def program(node: Node) -> str:
        try:
            if by_layer:
                await node.reach(await node.begin(1), 0)
            else:
                await node.compute(1)
        except ArithmeticError as error:
            return str(error)
        return "fine"

    path = tmp_path / "order"
    log = Recorder(path, 0, 1, 1)
    engine = ProcessEngine(transports(1)[0], evaluate=fail, log=log)
    assert engine.run(program) == "not finite"
    log.close()
    assert ReplayEngine([load(path)], evaluate=fail).run([program]) == ["not finite"]
    assert ReplayEngine([load(path)], evaluate=twice).run([program]) == ["fine"]


async def _ping(node: Node) -> float:
    other = 1 - node.rank
    await node.send(other, "ping", torch.ones(1))
    await node.recv(other, "ping")
    return await node.now()


@pytest.fixture
def pinged(tmp_path: Path) -> list[EventOrder]:
    recorded = Recorded(tmp_path, 2)
    recorded.run([_ping, _ping])
    return recorded.orders


def test_a_program_that_does_something_else(pinged: list[EventOrder]) -> None:
    async def computes(node: Node) -> Any:
        return await node.compute(1)

    with pytest.raises(OrderError, match=r"rank 0, entry 1 .*the program waits for a gradient"):
        ReplayEngine(pinged).run([computes, _ping])

    async def reaches(node: Node) -> Any:
        return await node.reach(await node.begin(1), 2)

    with pytest.raises(OrderError, match="the program waits for the gradient of layer 2"):
        ReplayEngine(pinged).run([reaches, _ping])

    async def other_tag(node: Node) -> Any:
        return await node.recv(1 - node.rank, "pong")

    with pytest.raises(OrderError, match="waits for a message from rank 1, tag 'pong'"):
        ReplayEngine(pinged).run([other_tag, _ping])

    async def short(node: Node) -> None:
        await node.send(1 - node.rank, "ping", torch.ones(1))

    with pytest.raises(OrderError, match="there is no such task"):
        ReplayEngine(pinged).run([short, _ping])

    async def long(node: Node) -> None:
        await _ping(node)
        await node.now()

    with pytest.raises(OrderError, match="'the end of the run', but the program waits"):
        ReplayEngine(pinged).run([long, _ping])


def test_a_message_that_never_comes(pinged: list[EventOrder]) -> None:
    async def silent(node: Node) -> Any:
        await node.recv(1 - node.rank, "ping")
        return await node.now()

    with pytest.raises(OrderError) as caught:
        ReplayEngine(pinged).run([_ping, silent])
    text = str(caught.value)
    assert "messages that are never sent" in text
    assert "rank 0, entry 1" in text
    assert "order-0, line 4" in text
    assert "rank 1 is at entry 3, 'the end of the run'" in text


def test_a_node_that_is_cut_short(pinged: list[EventOrder]) -> None:
    cut = replace(pinged[1], runs=(_one_entry(pinged[1]),))
    with pytest.raises(OrderError, match=r"rank 1, entry 1 .*'the end of the run', but"):
        ReplayEngine([pinged[0], cut]).run([_ping, _ping])


def test_orders_of_different_runs(pinged: list[EventOrder]) -> None:
    first, second = pinged
    with pytest.raises(OrderError, match="no orders"):
        ReplayEngine([])
    with pytest.raises(OrderError, match="rank 1 of 2, with 2 workers; expected rank 0 of 2"):
        ReplayEngine([second, first])
    with pytest.raises(OrderError, match="expected rank 0 of 1"):
        ReplayEngine([first])
    with pytest.raises(OrderError, match="of the same run"):
        ReplayEngine([first, replace(second, about="another")])
    with pytest.raises(OrderError, match=r"rank 1 has runs of the steps \[\], that of rank 0"):
        ReplayEngine([first, replace(second, runs=())])


def test_errors_of_programs_are_those_of_the_engines(pinged: list[EventOrder]) -> None:
    async def wrong(node: Node) -> list[str]:
        texts = []
        for effect in (
            node.send(5, "x", torch.ones(1)),
            node.sleep(-1.0),
            node.recv_within("x", float("inf")),
            _Nothing(),
        ):
            try:
                await effect
            except (ValueError, TypeError) as error:
                texts.append(str(error))
        await _ping(node)
        return texts

    (texts, _) = ReplayEngine(pinged).run([wrong, _ping])
    assert [text.split(";")[0] for text in texts[:2]] == [
        "rank 0 sends to 5",
        "rank 0 sleeps for -1.0 s, below zero",
    ]
    assert "a timeout is finite" in texts[2]
    assert "is no effect" in texts[3]


class _Nothing:
    def __await__(self) -> Any:
        yield self


def test_who_is_behind_goes_first() -> None:
    """Who looks on sees about what was to be seen."""
    seen: list[float] = []

    async def program(node: Node) -> None:
        for _ in range(4):
            now = await node.now()
            seen.append(now)

    def order(rank: int, *times: float) -> EventOrder:
        entries = (OrderEntry(0, "start"), *(OrderEntry(0, "now", (one,)) for one in times))
        return EventOrder(rank, 2, 2, "", (RunOrder(entries, times[-1]),))

    engine = ReplayEngine([order(0, 1.0, 2.0, 3.0, 4.0), order(1, 1.5, 2.5, 2.6, 3.5)])
    engine.run([program] * 2)
    assert seen == [1.0, 1.5, 2.0, 2.5, 3.0, 2.6, 3.5, 4.0]
    assert engine.now == 4.0


def test_done_messages_are_no_part_of_an_order(tmp_path: Path) -> None:
    path = tmp_path / "order"
    log = Recorder(path, 1, 2, 1)
    end = transports(2)[1]
    engine = ProcessEngine(end, 1, log=log)
    end.happen(Arrival(DONE, 0, 0, 1))

    async def daemon(node: Node) -> None:
        await node.recv_any("x")

    engine.run(daemon)
    log.close()
    assert [entry.kind for entry in load(path).runs[0].entries] == ["start"]
