"""Laws of received bytes: any bytes decode to a tensor of the right shape, or to a WireError."""

import itertools
import random
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from gradwire.core.codec import Codec, Kind, payload_context, unpack
from gradwire.core.composite import Composite
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.payload import DTYPES, Payload
from gradwire.core.spec import Spec
from gradwire.testing.forging import forge_checksum, forge_floats
from gradwire.testing.inputs import OTHER_CODECS
from gradwire.testing.laws import Laws, NotApplicable, raises

WIRE_LAWS = Laws()
KEY = Key(seed=4).private(0)
X = torch.tensor([0.5, -1.0, 0.0, 3.0, -0.25, 2.0, -2.5, 1.0, 0.125, -4.0, 0.75, 0.0, 1.5])
SPEC = Spec.of(X)


_DRAW = random.Random(0)
NO_BYTES = (
    torch.zeros(40),
    torch.zeros(40, dtype=torch.int8),
    torch.zeros(5, 8, dtype=torch.uint8),
)
RANDOM_BYTES = tuple(_DRAW.randbytes(_DRAW.randint(0, 80)) for _ in range(60))
DAMAGES = tuple(
    tuple((_DRAW.randrange(1 << 16), _DRAW.randrange(256)) for _ in range(_DRAW.randint(1, 6)))
    for _ in range(80)
)
CRAFTED = tuple(
    tuple(
        (_DRAW.randbytes(_DRAW.randint(0, 24)), _DRAW.choice((torch.uint8, torch.float32)))
        for _ in range(4)
    )
    for _ in range(25)
)


def honest(codec: Codec, x: Tensor = X) -> Payload:
    return codec.encode(x, codec.init(Spec.of(x)), KEY)[0]


def raw(payload: Payload) -> bytes:
    return bytes(payload.buffer.tolist())


@cache
def _honest_bytes(codec: Codec) -> bytes:
    return raw(honest(codec))


def receive(codec: Codec, data: bytes, spec: Spec = SPEC) -> Tensor:
    buffer = torch.tensor(list(data), dtype=torch.uint8)
    return codec.decode(unpack(codec, buffer, spec), spec, KEY)


def refuses(codec: Codec, data: bytes, spec: Spec = SPEC) -> None:
    with raises(WireError):
        receive(codec, data, spec)


def survives(codec: Codec, data: bytes, spec: Spec = SPEC) -> None:
    try:
        decoded = receive(codec, data, spec)
    except WireError:
        return
    assert decoded.shape == spec.shape
    assert decoded.dtype == spec.dtype


@WIRE_LAWS()
def what_was_sent_is_accepted(codec: Codec) -> None:
    assert receive(codec, raw(honest(codec))).shape == X.shape


@WIRE_LAWS()
def every_truncation_is_refused(codec: Codec) -> None:
    data = raw(honest(codec))
    for length in range(len(data)):
        refuses(codec, data[:length])


@WIRE_LAWS()
def bytes_too_many_are_refused(codec: Codec) -> None:
    data = raw(honest(codec))
    for extra in (b"\0", b"\xff", bytes(8), data):
        refuses(codec, data + extra)


@WIRE_LAWS(mask=(0x01, 0x80, 0xFF))
def every_flipped_byte_is_refused(codec: Codec, mask: int) -> None:
    data = raw(honest(codec))
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= mask
        refuses(codec, bytes(damaged))


@WIRE_LAWS(codecs=(OTHER_CODECS,))
def bytes_of_another_codec_are_refused(codec: Codec, codecs: Sequence[Codec]) -> None:
    for other in codecs:
        if other != codec:
            refuses(codec, _honest_bytes(other))


@WIRE_LAWS()
def bytes_of_another_tensor_are_refused(codec: Codec) -> None:
    for other in (X[:-1], X[:8], torch.cat([X, X]), X.reshape(1, -1), X.reshape(-1, 1), X[:0]):
        refuses(codec, raw(honest(codec, other)))
        refuses(codec, raw(honest(codec)), Spec.of(other))
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        refuses(codec, raw(honest(codec, X.to(dtype))))
        refuses(codec, raw(honest(codec)), Spec(SPEC.shape, dtype))


@WIRE_LAWS(buffer=NO_BYTES)
def only_vectors_of_bytes_are_unpacked(codec: Codec, buffer: Tensor) -> None:
    with raises(WireError, text="uint8"):
        unpack(codec, buffer, SPEC)


@WIRE_LAWS(data=RANDOM_BYTES)
def random_bytes_are_refused(codec: Codec, data: bytes) -> None:
    refuses(codec, data)
    refuses(codec, bytes([0x57, 1, len(codec.parts), 0]) + data)  # even behind a right header


@WIRE_LAWS(changes=DAMAGES)
def damage_with_a_valid_checksum_never_crashes(
    codec: Codec, changes: Sequence[tuple[int, int]]
) -> None:
    """A change is a place, of which the remainder by the number of bytes counts, and a value."""
    damaged = bytearray(raw(honest(codec)))
    for place, value in changes:
        damaged[place % len(damaged)] = value
    survives(codec, forge_checksum(bytes(damaged), payload_context(codec, SPEC)))


@WIRE_LAWS()
def every_byte_at_its_extremes_with_a_valid_checksum_never_crashes(codec: Codec) -> None:
    context, data = payload_context(codec, SPEC), raw(honest(codec))
    for position in range(len(data)):
        for value in (0x00, 0x7F, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[position] = value
            survives(codec, forge_checksum(bytes(damaged), context))


@WIRE_LAWS()
def damaged_side_information_of_a_long_tensor_never_crashes(codec: Codec) -> None:
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


@WIRE_LAWS()
def a_part_of_another_dtype_is_refused(codec: Codec) -> None:
    payload = honest(codec)
    for name, part in payload.parts.items():
        for dtype in DTYPES:
            if dtype != part.dtype:
                wrong = {**payload.parts, name: torch.ones(part.numel(), dtype=dtype)}
                refuses(codec, raw(Payload.pack(wrong, payload.context)))


@WIRE_LAWS()
def a_part_of_another_length_never_crashes(codec: Codec) -> None:
    payload = honest(codec)
    for name, part in payload.parts.items():
        for wrong in (part[:0], part[:-1], part[:1], part.repeat(2), part.repeat(50)):
            if wrong.numel() != part.numel():
                crafted = Payload.pack({**payload.parts, name: wrong}, payload.context)
                survives(codec, raw(crafted))
                if name == "values":
                    refuses(codec, raw(crafted))


@WIRE_LAWS()
def extreme_values_in_any_part_never_crash(codec: Codec) -> None:
    payload = honest(codec)
    for name, part in payload.parts.items():
        numbers: tuple[float, ...]
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


@WIRE_LAWS()
def parts_in_another_number_are_refused(codec: Codec) -> None:
    payload = honest(codec)
    fewer = dict(list(payload.parts.items())[1:])
    refuses(codec, raw(Payload.pack(fewer, payload.context)))
    more = {**payload.parts, "more": torch.zeros(1)}
    refuses(codec, raw(Payload.pack(more, payload.context)))


@WIRE_LAWS(exponent=(31, 40, 62))
def a_huge_declared_length_is_refused_without_allocating(codec: Codec, exponent: int) -> None:
    count, varint = 1 << exponent, bytearray()
    while count >= 0x80:
        varint.append(count & 0x7F | 0x80)
        count >>= 7
    varint.append(count)
    table = (bytes([7]) + bytes(varint)) * len(codec.parts)
    data = bytes([0x57, 1, len(codec.parts), 0, 0, 0, 0, 0]) + table + bytes(64)
    refuses(codec, forge_checksum(data, payload_context(codec, SPEC)))


@WIRE_LAWS(crafted=CRAFTED, numel=(0, 1, 13, 40))
def crafted_parts_for_any_tensor_never_crash(
    codec: Codec, crafted: Sequence[tuple[bytes, torch.dtype]], numel: int
) -> None:
    spec = Spec((numel,), torch.float32)
    parts = {
        name: torch.tensor(list(data), dtype=dtype)
        for name, (data, dtype) in zip(codec.parts, itertools.cycle(crafted))
    }
    survives(codec, raw(Payload.pack(parts, payload_context(codec, spec))), spec)


@WIRE_LAWS(value=(float("nan"), float("inf")))
def nan_and_infinity_are_refused_unless_values_travel_as_they_are(
    codec: Codec, value: float
) -> None:
    """What values decode to is checked where it meets the model; a scale is checked here."""
    if codec.traits.takes is not Kind.REAL:
        raise NotApplicable("it never sees values")
    x = Key(1).normal(40)
    spec = Spec.of(x)
    before = codec.encode(x, codec.init(spec), KEY)[0].buffer
    forged = forge_floats(before, value)
    try:
        decoded = codec.decode(unpack(codec, forged, spec), spec, KEY)
    except WireError:
        assert not torch.equal(forged, before)
        return
    if not torch.isfinite(decoded).all():
        assert codec.leaves is Kind.REAL or isinstance(codec, Composite), (
            f"decodes to {value}: refuse it"
        )
