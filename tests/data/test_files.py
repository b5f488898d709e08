import gzip
import hashlib
import io
import lzma
import tarfile
from pathlib import Path

import pytest

from gradwire.core.errors import DataError
from gradwire.data import files
from gradwire.data.files import DataFile

CONTENT = b"some data" * 1000


def data_file(url: str, content: bytes = CONTENT) -> DataFile:
    return DataFile("set", "part.bin.gz", url, len(content), hashlib.sha256(content).hexdigest())


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("where", ["set/part.bin", "set/part.bin.gz", "set/part.bin.xz"])
@pytest.mark.parametrize("bare", [False, True])
def test_finds_every_variant(folder: Path, where: str, bare: bool) -> None:
    path = put(folder / (where.removeprefix("set/") if bare else where), b"")
    assert files.find("part.bin.gz", ("set",)) == path


def test_finds_archives_whatever_their_compression(folder: Path) -> None:
    path = put(folder / "set" / "all.tar.xz", b"")
    assert files.find("all.tar.gz", ("set",)) == path


def test_order_of_places(folder: Path, cache: Path) -> None:
    assert files.find("part", ("set", "other")) is None
    for path in [
        folder / "part",
        folder / "other" / "part",
        cache / "set" / "part",
        folder / "set" / "part",
    ]:
        put(path, b"")
        assert files.find("part", ("set", "other")) == path


def test_a_data_folder_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(files.FOLDER_VARIABLE, "nowhere")
    with pytest.raises(DataError, match="GRADWIRE_DATA is 'nowhere', which is not a folder"):
        files.find("part", ("set",))


def test_cache_without_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert files.cache_folder() == tmp_path / ".cache" / "gradwire"


def test_downloads_once(server, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = data_file(server.put("part.bin.gz", CONTENT))
    path = files.obtain(file)
    assert path == cache / "set" / "part.bin.gz"
    assert path.read_bytes() == CONTENT
    assert file.url in capsys.readouterr().err
    assert files.obtain(file) == path
    assert server.num_requests == 1
    assert list(path.parent.iterdir()) == [path]


def test_downloads_from_file_urls(tmp_path: Path) -> None:
    origin = put(tmp_path / "origin", CONTENT)
    assert files.obtain(data_file(origin.as_uri())).read_bytes() == CONTENT


def bad_checksum(server) -> str:
    server.put("x", bytes(len(CONTENT)))
    return "its SHA-256 is"


def truncated(server) -> str:
    server.put("x", CONTENT[:100], declared=len(CONTENT))
    return "the server sent 100 of 9,000 bytes"


def too_long(server) -> str:
    server.put("x", CONTENT * 1000)
    return "the server sent more than the 9,000 bytes expected"


def not_there(server) -> str:
    return "404"


def silent(server) -> str:
    server.pages["/x"] = None
    return "timed out"


@pytest.mark.parametrize("fault", [bad_checksum, truncated, too_long, not_there, silent])
def test_failed_downloads_say_what_to_do(
    server, cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, fault
) -> None:
    monkeypatch.setattr(files, "TIMEOUT_S", 0.2)
    problem = fault(server)
    with pytest.raises(DataError, match=problem) as caught:
        files.obtain(data_file(server.url + "x"), "Or stay at home.")
    message = str(caught.value)
    assert f"downloading {server.url}x failed" in message
    assert "set/part.bin.gz (9,000 bytes) was not found" in message
    assert "$GRADWIRE_DATA/set/part.bin.gz" in message
    assert f"GRADWIRE_DATA is now {folder}" in message
    assert str(cache / "set" / "part.bin.gz") in message
    assert message.endswith("Or stay at home.")
    # nothing is left behind
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_offline() -> None:
    # port 9 of this machine: nobody answers
    with pytest.raises(DataError, match="GRADWIRE_DATA is not set") as caught:
        files.obtain(data_file("http://127.0.0.1:9/x"))
    assert "refused" in str(caught.value)


def test_cache_that_cannot_be_written(server, cache: Path) -> None:
    put(cache, b"a file where the folder should be")
    with pytest.raises(DataError, match=r"set/part\.bin\.gz"):
        files.obtain(data_file(server.put("x", CONTENT)))


def test_reads_what_was_compressed(tmp_path: Path) -> None:
    for name, content in [
        ("a.bin", CONTENT),
        ("a.gz", gzip.compress(CONTENT)),
        ("a.xz", lzma.compress(CONTENT)),
    ]:
        assert files.read(put(tmp_path / name, content), len(CONTENT)) == CONTENT


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress])
def test_refuses_damaged_compression(tmp_path: Path, compress) -> None:
    name = "a.gz" if compress is gzip.compress else "a.xz"
    good = compress(CONTENT)
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 0xFF
    for bad in [good[:-6], good[: len(good) // 2], good[:3], CONTENT, bytes(flipped)]:
        path = put(tmp_path / name, bad)
        with pytest.raises(DataError, match=name):
            files.read(path, len(CONTENT))


def test_refuses_more_than_expected(tmp_path: Path) -> None:
    path = put(tmp_path / "a.gz", gzip.compress(bytes(1 << 20)))
    with pytest.raises(DataError, match="exceed 1,000 bytes"):
        files.read(path, 1000)


def tar(members: dict[str, bytes], mode: str = "w:gz") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        archive.addfile(tarfile.TarInfo("folder/link.bin"), None)
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def test_reads_archives(tmp_path: Path) -> None:
    for suffix, mode in [("", "w"), (".gz", "w:gz"), (".xz", "w:xz")]:
        path = put(tmp_path / f"a.tar{suffix}", tar({"f/one": b"1", "../../two": b"22"}, mode))
        assert dict(files.read_archive(path, 2)) == {"link.bin": b"", "one": b"1", "two": b"22"}


def test_refuses_damaged_archives(tmp_path: Path) -> None:
    good = tar({"one": CONTENT})
    for bad in [good[:60], good[:-6], good[:-10], b"", CONTENT]:
        path = put(tmp_path / "a.tar.gz", bad)
        with pytest.raises(DataError, match=r"a\.tar\.gz"):
            list(files.read_archive(path, len(CONTENT)))
    path = put(tmp_path / "a.tar.gz", good)
    with pytest.raises(DataError, match="one has 9,000 bytes"):
        list(files.read_archive(path, 10))
