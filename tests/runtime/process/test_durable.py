"""A server that is killed at any moment and begun again: nothing is lost, nothing counts twice."""

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire.core.key import Key
from gradwire.core.node import Node
from gradwire.runtime.durable import journal
from gradwire.runtime.durable.checkpoint import Store
from gradwire.runtime.durable.transport import DurableTransport, count_arrivals, links_of
from gradwire.runtime.process.engine import ProcessEngine
from gradwire.runtime.process.frames import Headers, tag_hash
from gradwire.runtime.process.transport import ARRIVED, GOODBYE, JOINED, LOST, Arrival
from gradwire.testing.quadratics import train
from runtime.process.durable_world import Outcome, run, same
from sampling import slow

HOLDING = 'parameter_server(optimizer="server")'
SQUEEZING = 'parameter_server(optimizer="server", answers="compressed")'
FORMING = 'parameter_server(optimizer="worker", answers="compressed")'


def plan_of(synchronization: str, architecture: str, compression: str, **settings: Any) -> Any:
    settings = {"workers": 3, "steps": 5, "momentum": 0.9, "layers": (40, 9)} | settings
    return train(synchronization, architecture, compression, **(settings | {"pause_at": ()})).plan


def agree(one: Outcome, other: Outcome) -> None:
    assert one.params.keys() == other.params.keys()
    assert same(one.params, other.params)
    assert same(one.state, other.state)


CASES = [
    ("asp", HOLDING, "identity", {}),
    ("asp", SQUEEZING, "ef(topk(0.3))", {}),
    ("bsp", HOLDING, "identity", {}),
    ("bsp(backup=1)", SQUEEZING, "ef(sign)", {}),
    ("ssp(1)", HOLDING, "identity", {}),
    ("r2sp", SQUEEZING, "sign", {}),
    ("fedavg(1.0)", HOLDING, "identity", {}),
    ("bsp", FORMING, "identity", {}),
    ("bsp", FORMING, "ef(topk(0.3))", {}),
    ("asp", HOLDING, "identity", {"dies": {1: 2}, "returns": {1: 3}}),
    ("asp", SQUEEZING, "sign", {"dies": {1: 2}, "returns": {1: 3}}),
    ("ssp(2)", HOLDING, "identity", {"dies": {2: 1}, "returns": {2: 4}}),
    ("bsp(backup=1)", HOLDING, "identity", {"dies": {2: 1}, "returns": {2: 4}}),
    ("r2sp", HOLDING, "identity", {"dies": {1: 2}, "returns": {1: 3}}),
    ("fedavg(1.0)", HOLDING, "identity", {"dies": {1: 2}, "returns": {1: 3}}),
    ("bsp(timeout=0.003)", HOLDING, "identity", {"absent": (2,)}),
]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "every", [17, slow(5), pytest.param(1, marks=pytest.mark.long)], ids=lambda n: f"every {n}"
)
@pytest.mark.parametrize("is_durable", [True, False], ids=["durable", "order"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
def test_a_crash_at_any_moment_changes_nothing(
    tmp_path: Path, monkeypatch, case: Any, is_durable: bool, every: int
) -> None:
    *dimensions, happens = case
    if "dies" in happens and not is_durable and dimensions[0] in ("r2sp", "fedavg(1.0)"):
        pytest.skip("what only the worker had is lost with it, and others waited for that")
    plan = plan_of(*dimensions)
    settings = {"is_durable": is_durable, **happens}
    expected, names = run(plan, tmp_path / "none", monkeypatch, **settings)
    for number in range(len(dimensions[0]) % every, len(names), every):
        folder = tmp_path / str(number)
        outcome, _ = run(plan, folder, monkeypatch, limits=(number,), **settings)
        assert outcome.num_starts == 2
        if is_durable or "dies" not in happens:
            agree(outcome, expected)


@pytest.mark.few
@pytest.mark.parametrize("is_durable", [True, False], ids=["durable", "order"])
@pytest.mark.parametrize("case", CASES[1:2] + CASES[8:9] + CASES[-1:], ids=str)
def test_crashes_again_and_again(tmp_path: Path, monkeypatch, case: Any, is_durable: bool) -> None:
    *dimensions, happens = case
    plan = plan_of(*dimensions)
    settings = {"is_durable": is_durable, "max_nbytes": 1500, **happens}
    expected, _ = run(plan, tmp_path / "none", monkeypatch, **settings)
    key = Key(0).child("crashes")
    num_starts = 0
    for number in range(4):
        limits = tuple((8 + key.at(number).integers(20, 25)).tolist())
        outcome, _ = run(plan, tmp_path / str(number), monkeypatch, limits=limits, **settings)
        agree(outcome, expected)
        num_starts += outcome.num_starts
    assert num_starts > 20


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_the_machine_crashes_with_it(tmp_path: Path, monkeypatch, share: float) -> None:
    """Of what was written since the last sync only a part may be there."""
    plan = plan_of("asp", SQUEEZING, "topk(0.3)")
    expected, names = run(plan, tmp_path / "none", monkeypatch)

    def lose(folder: Path, synced: dict[str, int]) -> None:
        for path in folder.glob("journal-*"):
            least, size = synced.get(path.name, 0), path.stat().st_size
            with path.open("r+b") as file:
                file.truncate(least + int(share * (size - least)))

    for number in range(3, len(names), 11):
        folder = tmp_path / str(number)
        outcome, _ = run(plan, folder, monkeypatch, limits=(number,), after=lose)
        agree(outcome, expected)


def test_what_is_acknowledged_and_when(tmp_path: Path, monkeypatch) -> None:
    plan = plan_of("asp", HOLDING, "identity")
    _, names = run(plan, tmp_path / "durable", monkeypatch, max_nbytes=1 << 30)
    first = names.index("acknowledge")
    assert names[:first].count("hand over") == 0  # at once
    assert names[first - 2 : first] == ["write", "sync"]
    assert names.count("sync") <= names.count("hand over") // 2  # many at a time
    _, names = run(plan, tmp_path / "order", monkeypatch, max_nbytes=1 << 30, is_durable=False)
    first = names.index("acknowledge")
    assert names[:first].count("hand over") == 18  # 15 pushes, and that all are done
    assert "rename" in names[:first]  # when a state is on disk
    assert names[3 : names.index("rename")].count("sync") == 1  # that of the state
    size = sum(path.stat().st_size for path in (tmp_path / "order").glob("journal-*0.log"))
    assert size < 18 * 100


class Numbered:
    """A transport of one worker, whose rank is 1."""

    rank, size, num_bytes_sent = 2, 4, 0

    def __init__(self) -> None:
        self.arrivals: deque[Arrival] = deque()
        self.life = 0.0

    def next(self, timeout_s: float | None) -> Arrival | None:
        return self.arrivals.popleft() if self.arrivals else None

    def links(self) -> dict[int, tuple[float, int, int]]:
        return {1: (self.life, 0, 0)}

    def outstanding(self) -> dict[int, int]:
        return {}

    def acknowledge(self, src: int, number: int) -> None:
        pass


@pytest.mark.parametrize("is_saved", [True, False])
@pytest.mark.parametrize("is_durable", [True, False], ids=["durable", "order"])
def test_a_worker_that_takes_the_place_of_another_begins_with_one(
    tmp_path: Path, is_durable: bool, is_saved: bool
) -> None:
    """What the other one had sent, and nobody had read yet, does not count as its own."""
    inner: Any = Numbered()
    store = Store(tmp_path, "job")
    transport = DurableTransport(
        inner, store, dict, headers=Headers(), is_durable=is_durable, checkpoint_every_s=3600
    )
    push = Arrival(ARRIVED, 1, 0, 7, torch.ones(1000))
    inner.arrivals += push._replace(number=1), push._replace(number=2)
    while transport.next(0.01) is not None:
        pass
    inner.arrivals.append(push._replace(number=3))
    inner.arrivals += Arrival(LOST, 1, message="", time_s=5.0), Arrival(JOINED, 1, time_s=5.5)
    inner.life = 5.5
    for _ in range(3):
        assert transport.next(0.01) is not None
    if is_saved:
        assert transport.checkpoint()
    store.close()
    again = Store(tmp_path, "job")
    assert links_of(again)[1] == (5.5, 0, 0)
    again.close()


def test_a_worker_that_is_gone_before_its_first_message_is_read(
    tmp_path: Path, monkeypatch
) -> None:
    """A server begins again all the same, and is told of both."""
    inner: Any = Numbered()
    monkeypatch.setattr(inner, "links", dict)  # it is gone from there
    store = Store(tmp_path, "job")
    transport = DurableTransport(inner, store, lambda: None, headers=Headers())
    inner.arrivals += Arrival(ARRIVED, 1, 0, 7, torch.ones(10), number=1), Arrival(GOODBYE, 1)
    while transport.next(0.01) is not None:
        pass
    store.close()
    again = Store(tmp_path, "job")
    assert links_of(again)[1] == (0.0, 1, 0)
    told = DurableTransport(inner, again, lambda: None, headers=Headers())
    kinds = [arrival.kind for arrival in iter(lambda: told.next(0.01), None)]
    assert kinds == [ARRIVED, GOODBYE]
    again.close()


def test_what_cannot_be_told_again_now_is_not_forgotten(tmp_path: Path, monkeypatch) -> None:
    inner: Any = Numbered()
    store = Store(tmp_path, "job")
    transport = DurableTransport(inner, store, lambda: None, headers=Headers())
    inner.arrivals.append(Arrival(ARRIVED, 1, 0, 7, torch.ones(10), number=1))
    assert transport.next(0.01) is not None
    store.close()

    def fails(*args: Any) -> None:
        raise MemoryError("no room on the device")

    again = Store(tmp_path, "job")
    told = DurableTransport(inner, again, dict, headers=Headers())
    with monkeypatch.context() as patch:
        patch.setattr(journal, "decode", fails)
        with pytest.raises(MemoryError):
            told.next(0.01)
    told.close()  # at no good moment for a state
    at_last = Store(tmp_path, "job")
    arrival = DurableTransport(inner, at_last, dict, headers=Headers()).next(0.01)
    assert arrival is not None
    assert arrival.number == 1
    at_last.close()


def test_what_only_its_sender_has_is_not_waited_for_if_nobody_is_there(tmp_path: Path) -> None:
    inner: Any = Numbered()
    store = Store(tmp_path, "job")
    transport = DurableTransport(inner, store, dict, headers=Headers(), is_durable=False)
    large, small = torch.ones(1000), torch.ones(1)
    inner.arrivals += (
        Arrival(ARRIVED, 0, 0, 7, small, number=1),
        Arrival(ARRIVED, 1, 0, 7, large, number=1),
        Arrival(ARRIVED, 0, 0, 7, small, number=2),
    )
    while transport.next(0.01) is not None:
        pass
    store.close()
    again = Store(tmp_path, "job")
    assert count_arrivals(again) == 3
    told = DurableTransport(inner, again, dict, headers=Headers(), is_alone=True)
    found = [(arrival.src, arrival.number) for arrival in iter(lambda: told.next(0.01), None)]
    assert found == [(0, 1), (0, 2)]
    assert told.num_handed == 3
    again.close()


def test_a_store_is_closed_though_its_last_state_cannot_be_saved(tmp_path: Path) -> None:
    def fails() -> Any:
        raise OSError("no space left")

    store = Store(tmp_path, "job")
    inner: Any = Numbered()
    transport = DurableTransport(inner, store, fails, headers=Headers())
    with pytest.raises(OSError, match="no space"):
        transport.close()
    assert not Store.is_in_use(tmp_path)


def test_what_was_for_the_one_before_is_not_sent_to_who_came_when_all_is_told_again(
    tmp_path: Path,
) -> None:
    """Also if all had arrived long before the program that answers begins."""

    async def agrees(node: Node) -> None:
        await node.recv(3, "agreed")

    async def answers(node: Node) -> None:
        assert await node.members() == {0, 1}
        for number in range(2):
            rank, _ = await node.recv_any("request")
            await node.send(rank, "answer", torch.tensor([float(number)]))
        await node.recv(3, "end")

    class Recording(Numbered):
        def __init__(self, life: float) -> None:
            super().__init__()
            self.life, self.sent = life, []

        def deferred(self, job: int) -> list[Arrival]:
            return []

        def send(self, dst: int, job: int, tag: int, message: Any) -> None:
            self.sent.append((dst, float(message)))
            if message == 0.0:  # only then it is lost, and another one comes
                request = Arrival(ARRIVED, 1, 0, tag_hash("request"), torch.zeros(1), number=1)
                lost = Arrival(LOST, 1, message="", time_s=5.0)
                self.arrivals += lost, Arrival(JOINED, 1, time_s=5.5), request
                self.life = 5.5
            else:
                self.arrivals.append(Arrival(ARRIVED, 3, 0, tag_hash("end"), torch.zeros(1)))

    def run(inner: Any) -> list[tuple[int, float]]:
        store = Store(tmp_path, "job")
        transport = DurableTransport(inner, store, lambda: None, headers=Headers())
        engine = ProcessEngine(transport, 2, timeout_s=5)
        engine.run(lambda node: transport.recorded(agrees(node)), serves=False)
        engine.run(lambda node: transport.recorded(answers(node)), serves=False)
        store.close()
        return inner.sent

    inner = Recording(0.0)
    inner.arrivals += (
        Arrival(ARRIVED, 3, 0, tag_hash("agreed"), torch.zeros(1)),
        Arrival(ARRIVED, 1, 0, tag_hash("request"), torch.zeros(1), number=1),
    )
    assert run(inner) == [(1, 0.0), (1, 1.0)]
    assert run(Recording(5.5)) == [(1, 1.0)]  # who is there now gets what was for it
