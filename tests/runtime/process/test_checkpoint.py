"""The folder of a durable server: which state it begins with, whatever happened before."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire.runtime.durable.checkpoint import Store
from gradwire.runtime.durable.journal import DamagedError, encode, peek
from gradwire.runtime.process.frames import Headers
from gradwire.runtime.process.transport import DONE, Arrival

HEADERS = Headers()


def note(store: Store, number: int, is_whole: bool = True) -> None:
    store.journal.append(encode(Arrival(DONE, 0, number=number), HEADERS, is_whole))
    store.journal.commit()


def numbers(store: Store) -> list[int]:
    return [peek(body).number for body in store.bodies]


def state(number: int) -> dict[str, Any]:
    return {"number": number, "x": torch.full((100,), float(number))}


def filled(folder: Path, is_whole: bool = True) -> None:
    """Three generations; two records in each."""
    store = Store(folder, "job")
    for generation in range(3):
        note(store, 10 * generation + 1, is_whole)
        note(store, 10 * generation + 2, is_whole)
        if generation < 2:
            store.save(state(generation + 1))
    store.close()


def test_the_last_state_and_what_came_after(tmp_path: Path) -> None:
    store = Store(tmp_path, "job")
    assert store.state is None
    assert numbers(store) == []
    store.close()
    filled(tmp_path)
    store = Store(tmp_path, "job")
    assert store.state["number"] == 2
    assert torch.equal(store.state["x"], torch.full((100,), 2.0))
    assert numbers(store) == [21, 22]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        "journal-00000001.log",
        "journal-00000002.log",
        "lock",
        "state-00000001.pt",
        "state-00000002.pt",
    ]
    note(store, 23)
    store.close()
    store = Store(tmp_path, "job")
    assert numbers(store) == [21, 22, 23]
    store.close()


def test_a_journal_that_had_not_been_made_yet(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "journal-00000002.log").unlink()
    (tmp_path / "state-00000003.part").write_bytes(b"half of it")
    store = Store(tmp_path, "job")
    assert store.state["number"] == 2
    assert numbers(store) == []
    assert not list(tmp_path.glob("*.part"))
    store.close()


def damage(path: Path, place: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("place", [0, 30, 70, 500, -1])
def test_a_damaged_state_is_made_again_from_the_one_before(tmp_path: Path, place: int) -> None:
    filled(tmp_path)
    damage(tmp_path / "state-00000002.pt", place)
    store = Store(tmp_path, "job")
    assert store.state["number"] == 1
    assert numbers(store) == [11, 12, 21, 22]
    store.save(state(3))
    store.close()
    store = Store(tmp_path, "job")
    assert store.state["number"] == 3
    store.close()


def test_a_damaged_first_state(tmp_path: Path) -> None:
    store = Store(tmp_path, "job")
    note(store, 1)
    store.save(state(1))
    note(store, 2)
    store.close()
    damage(tmp_path / "state-00000001.pt", 100)
    store = Store(tmp_path, "job")
    assert store.state is None
    assert numbers(store) == [1, 2]
    store.close()


def test_what_cannot_be_had_again_is_an_error(tmp_path: Path) -> None:
    filled(tmp_path / "order", is_whole=False)
    damage(tmp_path / "order" / "state-00000002.pt", 100)
    with pytest.raises(DamagedError, match=r"state-00000002\.pt is damaged"):
        Store(tmp_path / "order", "job")
    filled(tmp_path / "gone")
    (tmp_path / "gone" / "state-00000002.pt").unlink()
    with pytest.raises(DamagedError, match="not the state that it continues from"):
        Store(tmp_path / "gone", "job")


def test_a_folder_is_of_one_job_and_one_process(tmp_path: Path) -> None:
    filled(tmp_path)
    with pytest.raises(ValueError, match="of another job"):
        Store(tmp_path, "another job")
    store = Store(tmp_path, "job")
    with pytest.raises(ValueError, match="in use"):
        Store(tmp_path, "job")
    store.close()
    Store(tmp_path, "job").close()


def test_what_was_not_written_yet_is_in_the_journal_before_a_state(tmp_path: Path) -> None:
    store = Store(tmp_path, "job")
    store.save(state(1))
    store.journal.append(encode(Arrival(DONE, 0, number=11), HEADERS))
    store.save(state(2))
    store.close()
    damage(tmp_path / "state-00000002.pt", 70)
    store = Store(tmp_path, "job")
    assert store.state["number"] == 1
    assert numbers(store) == [11]
    store.close()


def test_a_folder_is_in_use_while_a_process_has_it(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    assert not Store.is_in_use(folder)
    store = Store(folder, "job")
    assert Store.is_in_use(folder)
    store.close()
    assert not Store.is_in_use(folder)
