"""The journal of a server: what was committed is read again, and a torn end is told from damage."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire.core.node import Framed, Membership
from gradwire.runtime.durable import journal
from gradwire.runtime.durable.journal import (
    LINKS,
    NOT_STORED,
    TIMED_OUT,
    DamagedError,
    Journal,
    decode,
    encode,
    peek,
    read,
)
from gradwire.runtime.process.frames import Headers, tag_hash
from gradwire.runtime.process.transport import ARRIVED, DONE, GOODBYE, JOINED, LOST, Arrival

HEADERS = Headers(Membership)
JOB = bytes(range(16))
HEAD_NBYTES = 40


def body(arrival: Arrival, is_whole: bool = True) -> memoryview:
    return memoryview(b"".join(map(bytes, encode(arrival, HEADERS, is_whole))))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


@pytest.mark.parametrize("numel", [0, 1, 5, 3000, 70_000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8, torch.bool])
def test_messages_come_back(numel: int, dtype: torch.dtype) -> None:
    x = (torch.arange(numel) % 3).to(dtype)
    for message in (x, Framed(Membership(3, True, 1.5), x), Framed(None, x)):
        arrival = Arrival(ARRIVED, 2, 1, tag_hash("a"), message, None, 77)
        back = decode(body(arrival), HEADERS)
        assert back[:4] + back[5:] == arrival[:4] + arrival[5:]
        if isinstance(message, Framed):
            assert back.message.header == message.header
            assert same(back.message.data, x)
        else:
            assert same(back.message, x)
        assert peek(body(arrival))._replace(message=message) == arrival
        without = body(arrival, is_whole=False)
        assert len(without) < 50
        assert decode(without, HEADERS) == arrival._replace(message=NOT_STORED)


@pytest.mark.parametrize(
    "arrival",
    [
        Arrival(ARRIVED, 0, 0, 5, Framed(Membership(1, False, 0.25)), None, 9),
        Arrival(LOST, 3, message="käputt", time_s=2.5),
        Arrival(LOST, 3, message=""),
        Arrival(JOINED, 3, time_s=0.0),
        Arrival(JOINED, 3),
        Arrival(GOODBYE, 1, tag=4),
        Arrival(DONE, 1, 7, 2, number=12),
        Arrival(TIMED_OUT, 4, number=31),
        Arrival(LINKS, 4, message={0: (0.0, 12), 3: (2.5, 1 << 40)}),
    ],
)
def test_events_come_back(arrival: Arrival) -> None:
    assert decode(body(arrival), HEADERS) == arrival


def written(path: Path, groups: list[list[bytes]], commits: bool = True) -> list[int]:
    """Writes payloads as GOODBYEs with reasons; where each record begins, and the end."""
    out = Journal(path, JOB, 1)
    places = []
    for group in groups:
        for payload in group:
            places.append(HEAD_NBYTES + out.nbytes)
            out.append([*encode(Arrival(LOST, 1, message=""), HEADERS)[:1], payload])
        if commits:
            out.commit()
        else:
            out.write()
    places.append(HEAD_NBYTES + out.nbytes)
    out.close()
    return places


def found(path: Path) -> list[bytes]:
    records = read(path, JOB, 1)
    assert records is not None
    return [decode(one, HEADERS).message.encode() for one in records.bodies]


GROUPS = [[b"a", b"b" * 300], [b"c" * 7], [b"d", b"", b"f" * 20]]
FLAT = [payload for group in GROUPS for payload in group]


def test_what_was_committed_is_found_and_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "j"
    written(path, GROUPS)
    assert found(path) == FLAT
    records = read(path, JOB, 1)
    assert records is not None
    more = Journal(path, JOB, 1, records.end)
    more.append(encode(Arrival(LOST, 1, message="more"), HEADERS))
    more.commit()
    more.close()
    assert found(path) == [*FLAT, b"more"]


def test_what_is_not_written_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "j"
    out = Journal(path, JOB, 1)
    out.append(encode(Arrival(LOST, 1, message="x"), HEADERS))
    assert found(path) == []
    out.write()
    assert found(path) == [b"x"]
    out.close()


def test_a_torn_end_is_cut_off_wherever_it_is(tmp_path: Path, caplog, monkeypatch) -> None:
    monkeypatch.setattr(journal, "sync", lambda handle: None)  # that takes time
    monkeypatch.setattr(journal, "sync_folder", lambda folder: None)
    path = tmp_path / "j"
    places = written(path, GROUPS)
    whole = path.read_bytes()
    for size in range(HEAD_NBYTES, len(whole)):
        path.write_bytes(whole[:size])
        number = sum(place <= size for place in places[1:])
        caplog.clear()
        assert found(path) == FLAT[:number]
        assert ("cut off" in caplog.text) == (size not in places)
        records = read(path, JOB, 1)
        assert records is not None
        Journal(path, JOB, 1, records.end).close()
        assert path.stat().st_size == places[number]


def test_pages_of_the_last_group_may_be_missing_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "j"
    places = written(path, GROUPS)
    torn = bytearray(path.read_bytes())
    torn[places[3] : places[4]] = bytes(places[4] - places[3])  # the first of the last group
    path.write_bytes(torn)
    assert found(path) == FLAT[:3]


def test_damage_before_the_last_group_is_no_torn_end(tmp_path: Path) -> None:
    path = tmp_path / "j"
    places = written(path, GROUPS)
    whole = path.read_bytes()
    for place in range(HEAD_NBYTES, places[3]):
        damaged = bytearray(whole)
        damaged[place] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(DamagedError, match="damaged"):
            read(path, JOB, 1)
    for place in range(places[3], len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 4
        path.write_bytes(damaged)
        assert found(path) == FLAT[: sum(end <= place for end in places[1:])]


def test_without_commits_everything_may_be_torn(tmp_path: Path) -> None:
    path = tmp_path / "j"
    places = written(path, GROUPS, commits=False)
    damaged = bytearray(path.read_bytes())
    damaged[places[1] + 30] ^= 1
    path.write_bytes(damaged)
    assert found(path) == FLAT[:1]


def test_a_record_counts_only_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "j"
    places = written(path, [[b"x" * 10], [b"y" * 10]])
    whole = path.read_bytes()
    first, second = whole[places[0] : places[1]], whole[places[1] :]
    path.write_bytes(whole[:HEAD_NBYTES] + second + first)
    assert found(path) == []
    written(path, [[first + second]])  # a message that looks like records
    path.write_bytes(path.read_bytes()[:-1])
    assert found(path) == []


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "j"
    written(path, GROUPS)
    with pytest.raises(ValueError, match="another job"):
        read(path, bytes(16), 1)
    with pytest.raises(DamagedError, match="generation 2"):
        read(path, JOB, 2)
    whole = path.read_bytes()
    for size in range(HEAD_NBYTES):  # it had just been made
        path.write_bytes(whole[:size])
        assert read(path, JOB, 1) is None
    path.write_bytes(b"x" + whole[1:])
    with pytest.raises(DamagedError, match="no valid header"):
        read(path, JOB, 1)


def test_large_groups_and_short_writes(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "j"
    real = journal.os.writev
    monkeypatch.setattr(
        journal.os, "writev", lambda handle, pieces: real(handle, [b"".join(pieces)[:999]])
    )
    payloads = [str(i).encode() * (i % 50) for i in range(700)]
    written(path, [payloads])
    assert found(path) == payloads
