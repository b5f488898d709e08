import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest
import torch

from gradwire import data
from gradwire.core.errors import DataError
from gradwire.data import plays, shakespeare_roles, text

PATH = Path("plays")
CSV = (
    "Title,Chapter,Player,Line,Line ID,Stage Direction\r\n"
    "Play,,,,,\r\n"
    ",ACT I,,,,\r\n"
    ",,,Two households,0.1,\r\n"  # nobody has spoken yet
    ",,First  Lord,,,\r\n"
    ',,,"One, two",1.1,\r\n'
    ",,,,,They fight\r\n"
    ",,,three\tfour,1.2,\r\n"
    ",,Fool,,,\r\n"
    ",,King,,,\r\n"
    ",,,Five,1.3,\r\n"
    ",SCENE II,,,,\r\n"
    ",,,A heath,1.4,\r\n"
    ",,FIRST LORD,,,\r\n"
    ",,,Six,1.5,\r\n"
)


def test_speeches_by_role() -> None:
    assert plays.speeches_by_role("play", CSV.encode(), PATH) == {
        "play/FIRST LORD": ["One, two\nthree four", "Six"],
        "play/KING": ["Five"],
    }


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "needs columns Chapter, Player, Line"),
        (b"Title,Line\r\nx,y\r\n", "needs columns"),
        (CSV.encode() + b"\xff", "not a CSV in ASCII"),
        (CSV.encode() + b',"', "not a CSV in ASCII"),
    ],
)
def test_refuses_damaged_plays(content: bytes, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        plays.speeches_by_role("play", content, PATH)


def test_short_rows() -> None:
    # a row that ends early has None in the columns that it lacks
    assert plays.speeches_by_role("p", CSV.encode() + b"x\r\n", PATH)["p/KING"] == ["Five"]


def test_assemble() -> None:
    speeches = {
        "a/KING": ["k" * 999, "q" * 1000],  # 2001 characters with the line breaks
        "a/PAGE": ["p" * 998],  # one short of a thousand
        "b/FOOL": ["f" * 999],
    }
    dataset = shakespeare_roles.assemble(speeches, PATH)
    assert dataset.roles is not None
    # 1800 and 900 characters train, 201 and 100 test; a window has 80 and one to come
    assert [len(role) for role in dataset.roles] == [22, 11]
    assert dataset.num_test == 2 + 1
    assert torch.equal(torch.cat(dataset.roles), torch.arange(33))
    fool = dataset.train_inputs[dataset.roles[1]]
    assert (fool == dataset.vocabulary.index("f")).all()
    with pytest.raises(DataError, match="no role speaks 1000 characters"):
        shakespeare_roles.assemble({"a/PAGE": ["Exit"]}, PATH)


@pytest.mark.parametrize("content", [b"{", b"[1]", b'{"a": ["x", 1]}', b'{"a": "x"}', b"\xff"])
def test_refuses_damaged_json(folder: Path, content: bytes) -> None:
    (folder / "plays_by_role.json.gz").write_bytes(gzip.compress(content))
    with pytest.raises(DataError, match=r"plays_by_role\.json\.gz .*not"):
        shakespeare_roles.load()


def long_play(speaker: str) -> bytes:
    line = f",,,{speaker * 1000},1.1,\r\n"
    return f"Title,Chapter,Player,Line,Line ID,Stage Direction\r\n,,{speaker},,,\r\n{line}".encode()


def test_from_archive_and_from_downloads(folder: Path, server, monkeypatch) -> None:
    contents = {"one": long_play("A"), "two": long_play("B")}
    table = {n: (len(c), hashlib.sha256(c).hexdigest()) for n, c in contents.items()}
    monkeypatch.setattr(plays, "PLAYS", table)
    monkeypatch.setattr(plays, "URL", server.url)

    with pytest.raises(DataError, match=r"shakespeare/csv/one\.csv .*All 2 plays are needed"):
        shakespeare_roles.load()
    for name, content in contents.items():
        server.put(f"{name}.csv", content)
    downloaded = shakespeare_roles.load()

    with tarfile.open(folder / "plays_csv.tar.gz", "w:gz") as archive:
        for name, content in contents.items():
            info = tarfile.TarInfo(f"csv/{name}.csv")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    packed = shakespeare_roles.load()
    assert downloaded.num_train == packed.num_train == 22
    assert torch.equal(downloaded.train_inputs, packed.train_inputs)

    monkeypatch.setattr(plays, "PLAYS", table | {"three": (0, "")})
    with pytest.raises(DataError, match="does not hold the plays three"):
        shakespeare_roles.load()


def test_real_roles(real_data) -> None:
    [path] = real_data("shakespeare", "plays_by_role.json.gz")
    speeches = json.loads(gzip.decompress(path.read_bytes()))
    assert len(speeches) == 1339
    characters = {c for of_role in speeches.values() for speech in of_role for c in speech}
    assert "".join(sorted(characters)) == shakespeare_roles.VOCABULARY

    dataset = data.load("shakespeare_roles")
    assert repr(dataset) == "<shakespeare_roles: 45768 train, 4799 test, text [80]>"
    assert dataset.num_classes == 76
    assert dataset.roles is not None
    assert len(dataset.roles) == 639
    assert torch.equal(torch.cat(dataset.roles), torch.arange(dataset.num_train))
    # the first role's first words
    words = "".join(dataset.vocabulary[i] for i in dataset.train_inputs[0].tolist())
    assert words.startswith("Now, fair Hippolyta, our nuptial hour\nDraws on apace")
    assert len(words) == text.LENGTH


def test_real_plays_give_the_same_roles(real_data) -> None:
    by_role, archive = real_data("shakespeare", "plays_by_role.json.gz", "plays_csv.tar.gz")
    assert shakespeare_roles.read_archive(archive) == shakespeare_roles.read_by_role(by_role)
    for name, content in data.files.read_archive(archive, plays.LIMIT_BYTES):
        file = plays.play_file(name.removesuffix(".csv"))
        assert file.size_bytes == len(content)
        assert file.sha256 == hashlib.sha256(content).hexdigest()
