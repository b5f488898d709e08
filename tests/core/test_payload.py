import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.core.errors import WireError
from gradwire.core.payload import Payload, frame

DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)


def raw(payload: Payload) -> bytes:
    return bytes(payload.buffer.tolist())


def received(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


@st.composite
def parts(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    found = {}
    for i in range(draw(st.integers(0, 5))):
        dtype = draw(st.sampled_from(DTYPES))
        numbers = draw(st.lists(st.integers(0, 100), max_size=20))
        found[f"part {i}"] = torch.tensor(numbers, dtype=dtype)
    return found


@settings(max_examples=100, deadline=None)
@given(parts=parts(), context=st.integers(0, 2**32 - 1))
def test_parts_survive_packing_and_unpacking(parts, context) -> None:
    payload = Payload.pack(parts, context)
    again = Payload.unpack(received(raw(payload)), tuple(parts), context)
    for packed in (payload, again):
        assert list(packed.parts) == list(parts)
        for name, part in parts.items():
            assert packed.parts[name].dtype == part.dtype
            assert torch.equal(packed.parts[name], part)


@settings(max_examples=100, deadline=None)
@given(parts=parts())
def test_no_byte_is_wasted_beyond_one_alignment(parts) -> None:
    payload = Payload.pack(parts)
    data = sum(part.numel() * part.element_size() for part in parts.values())
    table = 2 * len(parts)  # lengths below 128 take one byte
    widest = max((part.element_size() for part in parts.values()), default=1)
    assert data + 8 + table <= payload.nbytes < data + 8 + table + widest


@settings(max_examples=100, deadline=None)
@given(parts=parts(), offset=st.integers(0, 9))
def test_views_are_aligned_also_in_a_slice_of_a_larger_buffer(parts, offset) -> None:
    payload = Payload.pack(parts)
    larger = torch.cat([torch.zeros(offset, dtype=torch.uint8), payload.buffer])
    sliced = Payload.unpack(larger[offset:], tuple(parts))
    for packed in (payload, sliced):
        for name, part in parts.items():
            assert packed.parts[name].data_ptr() % part.element_size() == 0
            assert torch.equal(packed.parts[name], part)


def test_views_are_aligned_in_memory_that_is_not() -> None:
    payload = Payload.pack({"a": torch.arange(5.0, dtype=torch.float64)})
    memory = bytearray(3) + raw(payload)
    unaligned = torch.frombuffer(memory, dtype=torch.uint8, offset=3)
    assert unaligned.data_ptr() % 8 != 0
    view = Payload.unpack(unaligned, ["a"]).parts["a"]
    assert view.data_ptr() % 8 == 0
    assert torch.equal(view, payload.parts["a"])


def test_a_strided_buffer_is_read_as_its_elements() -> None:
    payload = Payload.pack({"a": torch.arange(5.0)})
    strided = torch.stack([payload.buffer, payload.buffer], dim=1)[:, 0]
    assert not strided.is_contiguous()
    assert torch.equal(Payload.unpack(strided, ["a"]).parts["a"], torch.arange(5.0))


def test_the_layout_is_the_documented_one() -> None:
    parts = {
        "bytes": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "wide": torch.tensor([-1], dtype=torch.int64),
        "half": torch.tensor([258, 772], dtype=torch.int16),
    }
    data = raw(Payload.pack(parts, context=77))
    assert data[:4] == bytes([0x57, 1, 3, 0])  # magic, version, number of parts, zero
    assert int.from_bytes(data[4:8], "little") == zlib.crc32(data[8:], zlib.crc32(data[:4], 77))
    assert data[8:14] == bytes([0, 3, 4, 1, 2, 2])  # dtype code and length of each part
    assert data[14:16] == bytes(2)  # padding to the widest
    assert data[16:24] == b"\xff" * 8  # the widest part first
    assert data[24:28] == bytes([2, 1, 4, 3])  # little-endian
    assert data[28:] == bytes([1, 2, 3])


@pytest.mark.parametrize("numel", [127, 128, 16383, 16384, 2**21])
def test_lengths_are_varints(numel) -> None:
    payload = Payload.pack({"a": torch.zeros(numel, dtype=torch.uint8)})
    varint = 1 + (numel.bit_length() - 1) // 7
    assert payload.nbytes == 8 + 1 + varint + numel
    assert Payload.unpack(payload.buffer, ["a"]).parts["a"].numel() == numel


def test_the_parts_are_views_of_the_buffer_and_copies_of_what_was_given() -> None:
    x = torch.arange(4.0)
    payload = Payload.pack({"x": x})
    x[0] = 100.0
    assert payload.parts["x"][0] == 0.0
    buffer = payload.buffer.clone()
    view = Payload.unpack(buffer, ["x"]).parts["x"]
    assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


def test_parts_cannot_be_exchanged_in_place() -> None:
    payload = Payload.pack({"x": torch.zeros(1)})
    with pytest.raises(TypeError):
        payload.parts["x"] = torch.ones(1)


def test_a_matrix_is_packed_flat() -> None:
    payload = Payload.pack({"x": torch.arange(6.0).reshape(2, 3).t()})
    assert payload.parts["x"].tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]


def test_replacing_a_part_keeps_the_others_and_the_context() -> None:
    payload = Payload.pack({"a": torch.zeros(2), "b": torch.ones(3)}, context=5)
    changed = payload.replace(a=torch.tensor([7.0]))
    assert changed.parts["a"].tolist() == [7.0]
    assert changed.parts["b"].tolist() == [1.0] * 3
    assert payload.parts["a"].tolist() == [0.0] * 2
    assert Payload.unpack(changed.buffer, ["a", "b"], context=5).parts["a"].tolist() == [7.0]


def test_the_representation_says_what_is_inside() -> None:
    payload = Payload.pack({"values": torch.zeros(3)})
    assert repr(payload) == "Payload(24 bytes: values: 3 x torch.float32)"


def test_another_context_is_refused() -> None:
    payload = Payload.pack({"a": torch.zeros(2)}, context=1)
    for context in (0, 2, 2**32 - 1):
        with pytest.raises(WireError, match="another codec or tensor"):
            Payload.unpack(payload.buffer, ["a"], context)


@pytest.mark.parametrize(
    ("position", "value", "reason"),
    [
        (0, 0x58, "not a gradwire payload"),
        (1, 2, "version 2"),
        (2, 9, "9 parts, expected 1"),
        (3, 1, "not a gradwire payload"),
        (4, None, "checksum"),
        (8, 9, "dtype code 9"),
        (8, 255, "dtype code 255"),
        (9, 3, "header describes"),
        (20, None, "checksum"),
    ],
)
def test_each_kind_of_damage_is_named(position, value, reason) -> None:
    data = bytearray(raw(Payload.pack({"a": torch.arange(1.0, 5.0)})))
    data[position] = data[position] ^ 0xFF if value is None else value
    with pytest.raises(WireError, match=reason):
        Payload.unpack(received(bytes(data)), ["a"])


def test_a_length_without_an_end_is_refused() -> None:
    data = bytes([0x57, 1, 1, 0, 0, 0, 0, 0, 0]) + b"\xff" * 20
    with pytest.raises(WireError, match="cut off"):
        Payload.unpack(received(data), ["a"])


def test_a_table_that_ends_early_is_refused() -> None:
    for data in (bytes([0x57, 1, 2, 0, 0, 0, 0, 0]), bytes([0x57, 1, 1, 0, 0, 0, 0, 0, 7])):
        with pytest.raises(WireError):
            Payload.unpack(received(data), ["a", "b"][: data[2]])


def test_more_parts_than_a_byte_counts_are_refused() -> None:
    with pytest.raises(AssertionError, match="255"):
        Payload.pack({str(i): torch.zeros(1) for i in range(256)})


def test_a_check_that_waits_runs_before_anybody_sees_the_payload() -> None:
    kinds = {"a": (torch.float32, 3)}
    payload = Payload.blank(kinds, 0, torch.device("meta"))  # like an accelerator: not the CPU
    answers = iter([False, False, True])
    asked = []

    def check() -> None:
        asked.append(1)
        if not next(answers):
            raise ValueError("not finite")

    payload.check_later(check)
    assert not asked
    assert payload.nbytes == 24
    with pytest.raises(ValueError, match="not finite"):
        _ = payload.parts
    with pytest.raises(ValueError, match="not finite"):
        _ = payload.buffer
    assert payload.parts["a"].shape == (3,)
    assert payload.parts["a"].shape == (3,)
    assert len(asked) == 3, "a check that has passed is not made again"


def test_on_the_cpu_nothing_waits() -> None:
    def check() -> None:
        raise ValueError("not finite")

    with pytest.raises(ValueError, match="not finite"):
        Payload.blank({"a": (torch.float32, 3)}, 0, torch.device("cpu")).check_later(check)


def test_parts_that_are_written_later_are_those_of_packed_ones() -> None:
    given = {"a": torch.arange(5, dtype=torch.uint8), "b": torch.arange(3.0)}
    blank = Payload.blank(
        {name: (x.dtype, x.numel()) for name, x in given.items()}, 7, given["a"].device
    )
    for name, x in given.items():
        blank.parts[name].copy_(x)
    assert raw(blank) == raw(Payload.pack(given, 7))


def test_own_bytes_are_given_for_their_frame_alone_and_after_the_check():
    kinds = {"scale": (torch.float32, 2), "values": (torch.uint8, 5)}
    payload = Payload.blank(kinds, 7, torch.device("cpu"))
    assert payload.own_bytes(frame(kinds)) is None  # of the CPU
    payload.is_own = True
    other = frame({"scale": (torch.float32, 2), "values": (torch.uint8, 6)})
    assert payload.own_bytes(other) is None
    found = payload.own_bytes(frame(kinds))
    assert found is not None
    offset = frame(kinds).offsets[1]
    found[offset : offset + 5] = 3
    assert payload.parts["values"].tolist() == [3] * 5

    def refuse() -> None:
        raise ValueError("not finite")

    with pytest.raises(ValueError, match="not finite"):
        payload.check_later(refuse)
    with pytest.raises(ValueError, match="not finite"):
        payload.own_bytes(frame(kinds))
    assert not Payload.pack(payload._parts).is_own
