"""What arrives may be anything: every codec answers `WireError` or a tensor of the right shape."""

import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire.core.codec import Codec, payload_context, unpack
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.payload import Payload
from gradwire.core.spec import Spec

KEY = Key(seed=4).private(0)
X = torch.tensor([0.5, -1.0, 0.0, 3.0, -0.25, 2.0, -2.5, 1.0, 0.125, -4.0, 0.75, 0.0, 1.5])
SPEC = Spec.of(X)
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


def honest(codec: Codec, x: Tensor = X) -> Payload:
    return codec.encode(x, codec.init(Spec.of(x)), KEY)[0]


def raw(payload: Payload) -> bytes:
    return bytes(payload.buffer.tolist())


def receive(codec: Codec, data: bytes, spec: Spec = SPEC) -> Tensor:
    buffer = torch.tensor(list(data), dtype=torch.uint8)
    return codec.decode(unpack(codec, buffer, spec), spec, KEY)


def refuses(codec: Codec, data: bytes, spec: Spec = SPEC) -> None:
    with pytest.raises(WireError):
        receive(codec, data, spec)


def survives(codec: Codec, data: bytes, spec: Spec = SPEC) -> None:
    try:
        decoded = receive(codec, data, spec)
    except WireError:
        return
    assert decoded.shape == spec.shape
    assert decoded.dtype == spec.dtype


def sealed(data: bytes, context: int) -> bytes:
    """With the checksum that belongs to these bytes: what a malicious sender would do."""
    if len(data) < 8:
        return data
    crc = zlib.crc32(data[8:], zlib.crc32(data[:4], context))
    return data[:4] + crc.to_bytes(4, "little") + data[8:]


def test_what_was_sent_is_accepted(codec) -> None:
    assert receive(codec, raw(honest(codec))).shape == X.shape


def test_every_truncation_is_refused(codec) -> None:
    data = raw(honest(codec))
    for length in range(len(data)):
        refuses(codec, data[:length])


def test_bytes_too_many_are_refused(codec) -> None:
    data = raw(honest(codec))
    for extra in (b"\0", b"\xff", bytes(8), data):
        refuses(codec, data + extra)


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF], ids=hex)
def test_every_flipped_byte_is_refused(codec, mask) -> None:
    data = raw(honest(codec))
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= mask
        refuses(codec, bytes(damaged))


def test_bytes_of_another_codec_are_refused(codec, codecs) -> None:
    for other in codecs:
        if other != codec:
            refuses(codec, raw(honest(other)))


def test_bytes_of_another_tensor_are_refused(codec) -> None:
    for other in (X[:-1], X[:8], torch.cat([X, X]), X.reshape(1, -1), X.reshape(-1, 1), X[:0]):
        refuses(codec, raw(honest(codec, other)))
        refuses(codec, raw(honest(codec)), Spec.of(other))
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        refuses(codec, raw(honest(codec, X.to(dtype))))
        refuses(codec, raw(honest(codec)), Spec(SPEC.shape, dtype))


@pytest.mark.parametrize(
    "buffer",
    [torch.zeros(40), torch.zeros(40, dtype=torch.int8), torch.zeros(5, 8, dtype=torch.uint8)],
    ids=["float32", "int8", "matrix"],
)
def test_only_vectors_of_bytes_are_unpacked(codec, buffer) -> None:
    with pytest.raises(WireError, match="uint8"):
        unpack(codec, buffer, SPEC)


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=80))
def test_random_bytes_are_refused(codec, data) -> None:
    refuses(codec, data)
    refuses(codec, bytes([0x57, 1, len(codec.parts), 0]) + data)  # even behind a right header


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_damage_with_a_valid_checksum_never_crashes(codec, data) -> None:
    context = payload_context(codec, SPEC)
    damaged = bytearray(raw(honest(codec)))
    for _ in range(data.draw(st.integers(1, 6))):
        position = data.draw(st.integers(0, len(damaged) - 1))
        damaged[position] = data.draw(st.integers(0, 255))
    survives(codec, sealed(bytes(damaged), context))


def test_every_byte_at_its_extremes_with_a_valid_checksum_never_crashes(codec) -> None:
    context, data = payload_context(codec, SPEC), raw(honest(codec))
    for position in range(len(data)):
        for value in (0x00, 0x7F, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[position] = value
            survives(codec, sealed(bytes(damaged), context))


def test_damaged_side_information_of_a_long_tensor_never_crashes(codec) -> None:
    # Long enough for sparse positions to be coded as gaps instead of a bitmap.
    x = Key(5).normal(600)
    payload = honest(codec, x)
    for name, part in payload.parts.items():
        if name == "values":
            continue
        for position in range(min(48, part.numel() * part.element_size())):
            for value in (0x00, 0x7F, 0x80, 0xFF):
                damaged = part.clone()
                damaged.view(torch.uint8)[position] = value
                crafted = Payload.pack({**payload.parts, name: damaged}, payload.context)
                survives(codec, raw(crafted), Spec.of(x))


def test_a_part_of_another_dtype_is_refused(codec) -> None:
    payload = honest(codec)
    for name, part in payload.parts.items():
        for dtype in DTYPES:
            if dtype != part.dtype:
                wrong = {**payload.parts, name: torch.ones(part.numel(), dtype=dtype)}
                refuses(codec, raw(Payload.pack(wrong, payload.context)))


def test_a_part_of_another_length_never_crashes(codec) -> None:
    payload = honest(codec)
    for name, part in payload.parts.items():
        for wrong in (part[:0], part[:-1], part[:1], part.repeat(2), part.repeat(50)):
            if wrong.numel() != part.numel():
                crafted = Payload.pack({**payload.parts, name: wrong}, payload.context)
                survives(codec, raw(crafted))
                if name == "values":
                    refuses(codec, raw(crafted))


def test_extreme_values_in_any_part_never_crash(codec) -> None:
    payload = honest(codec)
    for name, part in payload.parts.items():
        if part.dtype.is_floating_point:
            largest = torch.finfo(part.dtype).max
            numbers = (float("nan"), float("inf"), -float("inf"), -1.0, largest, -largest, 0.0)
        else:
            info = torch.iinfo(part.dtype)
            numbers = (info.min, info.max, 0, 1, info.max // 2)
        for number in numbers:
            wrong = torch.full_like(part, number)
            crafted = Payload.pack({**payload.parts, name: wrong}, payload.context)
            survives(codec, raw(crafted))


def test_parts_in_another_number_are_refused(codec) -> None:
    payload = honest(codec)
    fewer = dict(list(payload.parts.items())[1:])
    refuses(codec, raw(Payload.pack(fewer, payload.context)))
    more = {**payload.parts, "more": torch.zeros(1)}
    refuses(codec, raw(Payload.pack(more, payload.context)))


@pytest.mark.parametrize("exponent", [31, 40, 62])
def test_a_huge_declared_length_is_refused_without_allocating(codec, exponent) -> None:
    count, varint = 1 << exponent, bytearray()
    while count >= 0x80:
        varint.append(count & 0x7F | 0x80)
        count >>= 7
    varint.append(count)
    table = (bytes([7]) + bytes(varint)) * len(codec.parts)
    data = bytes([0x57, 1, len(codec.parts), 0, 0, 0, 0, 0]) + table + bytes(64)
    refuses(codec, sealed(data, payload_context(codec, SPEC)))


@settings(max_examples=25, deadline=None)
@given(data=st.data(), numel=st.integers(0, 40))
def test_crafted_parts_for_any_tensor_never_crash(codec, data, numel) -> None:
    spec = Spec((numel,), torch.float32)
    parts = {
        name: torch.tensor(
            list(data.draw(st.binary(max_size=24))),
            dtype=data.draw(st.sampled_from((torch.uint8, torch.float32))),
        )
        for name in codec.parts
    }
    survives(codec, raw(Payload.pack(parts, payload_context(codec, spec))), spec)
