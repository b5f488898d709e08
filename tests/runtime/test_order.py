"""The file of a recorded order: what is written is read, and what is not an order is refused."""

from pathlib import Path
from typing import Any

import pytest

from gradwire.core.errors import PeerLost
from gradwire.core.node import (
    Computation,
    Compute,
    CurrentMembers,
    Framed,
    Membership,
    Now,
    Reach,
    Recv,
    RecvAny,
    Send,
    Sleep,
)
from gradwire.runtime.replay.order import OrderEntry, OrderError, Recorder, load, short_hash
from gradwire.runtime.storage.text import LineSeal

TAG = ("x", 1)
HEAD = '{"format":"gradwire order","version":5,"rank":0,"nodes":3,"workers":2,"about":""}'


def sealed(*lines: str) -> str:
    """As they are written."""
    seal = LineSeal()
    return "".join(map(seal.seal, lines))


def after(path: Path, line: str) -> str:
    """As it would be written at the end of this file."""
    seal = LineSeal()
    assert all(seal.open(before) for before in path.read_text().splitlines())
    return seal.seal(line)


def recorded(path: Path) -> Path:
    log = Recorder(path, 1, 3, 2, "a test")
    log.begin()
    log.resume(0, None, None)
    for effect, value, failure in [
        (Send(0, TAG, None, 0, ""), None, None),
        (Recv(2, TAG), "a message", None),
        (RecvAny(TAG), (2, Framed(Membership(0, True, 1.0))), None),
        (RecvAny(TAG, 0.5), None, None),
        (RecvAny(TAG), (1, Framed(Membership(0, False, 0.1))), None),
        (Recv(1, TAG), Framed(Membership(0, True, 0.2)), None),
        (Recv(0, TAG), None, PeerLost(0, 0.1, 1 / 3)),
        (Compute("request"), "gradient", None),
        (Compute("request"), None, ValueError("no gradient")),
        (Reach(Computation(), 1), "gradient", None),
        (Reach(Computation(), 0), None, ValueError("no gradient")),
        (Sleep(1.0), None, None),
        (Now(), 1 / 7, None),
        (CurrentMembers(), frozenset((1, 0)), None),
    ]:
        log.ask(0, effect)
        log.resume(0, value, failure)
    log.end(2.5)
    log.result("a digest")
    log.close()
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    order = load(recorded(tmp_path / "order"))
    assert (order.rank, order.num_nodes, order.num_workers) == (1, 3, 2)
    assert (order.about, order.result) == ("a test", "a digest")
    (run,) = order.runs
    tag = short_hash(TAG)
    assert run.end_s == 2.5
    assert run.entries == (
        OrderEntry(0, "start"),
        OrderEntry(0, "received", (2, tag)),
        OrderEntry(0, "received any", (2, tag)),  # sent by another rank
        OrderEntry(0, "nothing", (tag,)),
        OrderEntry(0, "change", (tag, 0, 0, 0.1)),
        OrderEntry(0, "change", (tag, 0, 1, 0.2)),
        OrderEntry(0, "lost", (0, tag, 0, 0.1, 1 / 3)),
        OrderEntry(0, "computed"),
        OrderEntry(0, "computed"),
        OrderEntry(0, "reached"),
        OrderEntry(0, "reached"),
        OrderEntry(0, "slept"),
        OrderEntry(0, "now", (1 / 7,)),
        OrderEntry(0, "members", (0, 1)),
    )


def test_a_process_that_was_killed_leaves_what_it_did(tmp_path: Path) -> None:
    path = tmp_path / "order"
    log = Recorder(path, 0, 1, 1)
    log.begin()
    log.resume(0, None, None)
    lines = [line.partition("\t")[0] for line in path.read_text().splitlines()]
    assert lines[1:] == ['["run",0,0]', '[0,"start"]']
    log.close()


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([], "is no recorded order"),
        (["{}"], "is no recorded order"),
        (["[1]"], "is no recorded order"),
        ([HEAD.replace("workers", "worker")], "is no recorded order"),
        ([HEAD.replace('"rank":0', '"rank":true')], "is no recorded order"),
        ([HEAD.replace('"version":5', '"version":6')], "version 6, this program reads 4 and 5"),
        ([HEAD.replace('"rank":0', '"rank":3')], "rank 3 of 3 nodes"),
        ([HEAD.replace('"workers":2', '"workers":4')], "of which 4 are workers"),
        ([HEAD, '["run",0,0]'], "ends in the middle of a run, after line 2"),
        ([HEAD, '["run",0,0]', '[0,"start"]', '[0,"no'], "line 4: .* is no JSON"),
        ([HEAD, "[" * 100_000], "is no JSON"),
        ([HEAD, '[0,"start"]'], "line 2: .* is not expected there"),
        ([HEAD, '["end",1.0]'], "line 2: .* is not expected there"),
        ([HEAD, '["run",0,0]', '["run",0,0]'], "line 3: .* is not expected there"),
        ([HEAD, '["run"]'], "line 2: .* is not expected there"),
        ([HEAD, '["run",-1,0]'], "line 2: .* is not expected there"),
        ([HEAD, '["run",0,0]', '["result","x"]'], "line 3: .* is not expected there"),
        ([HEAD, '["result",""]'], "line 2: .* is not expected there"),
        ([HEAD, '["result","x"]', '["run",0,0]'], "line 3: .* is not expected there"),
        ([HEAD, '["run",0,0]', '["end"]'], "is not expected there"),
        ([HEAD, '["run",0,0]', '["end",NaN]'], "is not expected there"),
        ([HEAD, '["run",0,0]', '[-1,"start"]'], "is not expected there"),
        ([HEAD, '["run",0,0]', '[0,"begin"]'], "is not expected there"),
        ([HEAD, '["run",0,0]', '[0,["start"]]'], "is not expected there"),
        ([HEAD, '["run",0,0]', '[0,"start",1]'], "is not expected there"),
        ([HEAD, '["run",0,0]', '[0,"start"]', '[0,"start"]'], "task 0 started before"),
        ([HEAD, '["run",0,0]', '[0,"start"]', '[1,"slept"]'], "task 1 has not started"),
        ([HEAD, '["run",0,0]', '[0,"start"]', '[0,"received",3,1]'], "is not expected there"),
        ([HEAD, '["run",0,0]', '[0,"start"]', '[0,"received",1]'], "is not expected there"),
        ([HEAD, '["run",0,0]', '[0,"start"]', '[0,"received",1,4294967296]'], "is not expected"),
        ([HEAD, '["run",0,0]', '[0,"start"]', '[0,"change",1,1,2,0.5]'], "is not expected there"),
        ([HEAD, '["run",0,0]', '[0,"start"]', '[0,"now","1"]'], "is not expected there"),
        ([HEAD, '["run",0,0]', '[0,"start"]', '[0,"members",0,7]'], "is not expected there"),
    ],
)
def test_what_is_no_order_is_refused(lines: list[str], why: str, tmp_path: Path) -> None:
    path = tmp_path / "order"
    path.write_text(sealed(*lines))
    with pytest.raises(OrderError, match=why):
        load(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(OrderError, match="cannot be read"):
        load(tmp_path / "order")
    (tmp_path / "order").write_bytes(b"\xff\xfe")
    with pytest.raises(OrderError, match="cannot be read"):
        load(tmp_path / "order")


def segments(path: Path, *steps: tuple[int, int], first: int = 0) -> None:
    log = Recorder(path, 0, 1, 1, "a test", first)
    for one in steps:
        log.steps = one
        log.begin()
        log.resume(0, None, None)
        log.end(1.0)
    log.close()


def test_a_run_that_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "order"
    segments(path, (0, 5), (5, 7), (7, 9))
    with path.open("a") as file:
        file.write(after(path, '["run",9,12]') + '[0,"st')  # there it was killed
    assert [run.steps for run in load(path, was_killed=True).runs][3] == (9, 12)
    segments(path, (7, 12), first=7)
    assert [run.steps for run in load(path).runs] == [(0, 5), (5, 7), (7, 12)]


def test_a_run_that_cannot_be_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "order"
    segments(path, (0, 5), (5, 7))
    with pytest.raises(OrderError, match="up to step 5, not 6"):
        Recorder(path, 0, 1, 1, "a test", 6)
    with pytest.raises(OrderError, match="is the order of another run"):
        Recorder(path, 0, 1, 1, "another", 5)


def test_a_process_that_is_killed_as_it_goes_on_leaves_the_order(
    tmp_path: Path, monkeypatch
) -> None:
    """At no moment is what is kept not in the file."""
    path = tmp_path / "order"
    segments(path, (0, 5), (5, 7))
    sizes = []
    real = Path.open

    def looking(self: Path, *args: Any, **settings: Any) -> Any:
        sizes.append(path.stat().st_size)
        opened = real(self, *args, **settings)
        sizes.append(path.stat().st_size)
        return opened

    monkeypatch.setattr(Path, "open", looking)
    Recorder(path, 0, 1, 1, "a test", 5).close()
    assert min(sizes) == path.stat().st_size
