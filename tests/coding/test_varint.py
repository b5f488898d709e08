"""Numbers in seven bits a byte."""

import pytest

from gradwire.coding.varint import read_varints, write_varints
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
