"""Numbers and texts as bytes: they come back, and forged bytes are refused."""

import pytest

from gradwire.core.binary import (
    ByteReader,
    read_varints,
    write_chunk,
    write_f64,
    write_signed,
    write_text,
    write_varints,
)
from gradwire.core.errors import WireError

NUMBERS = [0, 1, 127, 128, 300, 16383, 16384, 2**40]


def test_numbers_come_back_and_take_the_bytes_they_need() -> None:
    data = write_varints(NUMBERS)
    assert len(data) == 1 + 1 + 1 + 2 + 2 + 2 + 3 + 6
    assert read_varints(data + b"rest", len(NUMBERS), 2**40) == (NUMBERS, b"rest")
    assert write_varints([300]) == bytes([0xAC, 0x02])


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff\xff\xff\xff\xff\xff", b"\x81\x01", b"\x65"])
def test_what_is_cut_off_or_too_large_is_refused(data) -> None:
    with pytest.raises(WireError):
        read_varints(data, 1, 100)


def test_a_number_has_one_encoding() -> None:
    with pytest.raises(WireError, match="more bytes than it needs"):
        read_varints(b"\x81\x00", 1, 100)


def test_a_reader_reads_what_was_written() -> None:
    out = bytearray()
    for value in (0, -1, 5, -(2**64), 2**64 - 1):
        write_signed(out, value)
    write_f64(out, 1.5)
    write_text(out, "größer")
    write_chunk(out, b"\0\xff")
    reader = ByteReader(bytes(out), "an example")
    assert [reader.signed() for _ in range(5)] == [0, -1, 5, -(2**64), 2**64 - 1]
    assert reader.f64() == 1.5
    assert reader.text() == "größer"
    assert reader.chunk() == b"\0\xff"
    reader.end()


def test_a_reader_names_what_is_wrong() -> None:
    with pytest.raises(WireError, match="an example is cut off: it ends 1 bytes too early"):
        ByteReader(b"\x03ab", "an example").chunk()
    with pytest.raises(WireError, match="not utf-8"):
        ByteReader(b"\x02\xff\xfe", "an example").text()
    with pytest.raises(WireError, match="2 bytes are left over behind an example"):
        ByteReader(b"ab", "an example").end()
    with pytest.raises(WireError, match="a colour has 3 choices, got number 7"):
        ByteReader(b"\x07", "an example").choice(3, "a colour")
