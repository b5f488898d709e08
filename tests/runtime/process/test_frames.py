"""Messages as bytes: what goes in comes out, and forged bytes only ever give a WireError.

The bytes of header objects are in test_headers.py.
"""

import hashlib
import struct
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.core.errors import WireError
from gradwire.core.node import Framed
from gradwire.runtime.process import frames
from gradwire.runtime.process.frames import (
    BLOCK_NBYTES,
    DONE,
    Headers,
    pack,
    pack_control,
    tag_hash,
    unpack,
)


@dataclass(frozen=True)
class Plain:
    kind: Literal["a", "b"]
    step: int
    weight: float | None = None
    version: tuple[float, int] | None = None
    ranks: tuple[int, ...] = ()
    name: str = ""
    there: bool = False


@dataclass(frozen=True)
class Empty:
    pass


HEADERS = Headers(Plain, Empty)
DTYPES = st.sampled_from(frames._DTYPES)
SHAPES = st.lists(st.integers(0, 5), max_size=4)
FLOATS = st.floats(allow_nan=False)
INTEGERS = st.integers(-(2**64), 2**64 - 1)
PLAINS = st.builds(
    Plain,
    st.sampled_from("ab"),
    INTEGERS,
    st.none() | FLOATS,
    st.none() | st.tuples(FLOATS, INTEGERS),
    st.lists(INTEGERS, max_size=5).map(tuple),
    st.text(max_size=20),
    st.booleans(),
)
TAGS = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | st.text(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


def through(message: Any, headers: Headers = HEADERS) -> Any:
    packed = pack(3, 2**64 - 1, message, headers)
    frame = unpack(packed.block.numpy().tobytes(), headers)
    assert (frame.job, frame.tag) == (3, 2**64 - 1)
    assert frame.num_to_come == (0 if packed.payload is None else packed.payload.numel())
    payload = packed.payload
    if payload is None:
        payload = packed.block[frame.start : frame.start + frame.nbytes].clone()
    return frame.message(payload)


def same(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    return mine.dtype == theirs.dtype and torch.equal(mine, theirs)


@given(DTYPES, SHAPES)
def test_tensors_come_out_as_they_went_in(dtype: torch.dtype, shape: list[int]) -> None:
    numel = int(torch.tensor(shape).prod()) if shape else 1
    tensor = torch.arange(numel).reshape(shape).to(dtype)
    assert same(through(tensor), tensor)


def test_a_long_payload_is_not_copied() -> None:
    tensor = torch.arange(20_000.0)
    packed = pack(0, 1, tensor, HEADERS)
    assert packed.payload is not None
    assert packed.payload.data_ptr() == tensor.data_ptr()
    assert same(through(tensor), tensor)
    turned = torch.arange(20_000.0).reshape(100, 200).T
    assert same(through(turned), turned)


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_around_the_length_of_a_block(spare: int) -> None:
    tensor = torch.arange(BLOCK_NBYTES - 48 + spare).to(torch.uint8)
    assert (pack(0, 0, tensor, HEADERS).payload is None) == (spare <= 0)
    assert same(through(tensor), tensor)


@given(st.none() | PLAINS | st.just(Empty()), st.booleans())
def test_headers_come_out_as_they_went_in(header: Any, has_data: bool) -> None:
    data = torch.ones(3) if has_data else None
    framed = through(Framed(header, data))
    assert framed.header == header
    assert type(framed.header) is type(header)
    assert (framed.data is None) == (data is None)


def test_bools_are_zero_or_one() -> None:
    packed = pack(0, 0, torch.tensor([True, False]), HEADERS)
    frame = unpack(packed.block.numpy().tobytes(), HEADERS)
    bits = frame.message(torch.tensor([7, 0], dtype=torch.uint8)).view(torch.uint8)
    assert bits.tolist() == [1, 0]


def test_control_frames() -> None:
    frame = unpack(pack_control(DONE, 7, 9).block.numpy().tobytes(), HEADERS)
    assert (frame.kind, frame.job, frame.tag, frame.dtype) == (DONE, 7, 9, None)


@given(TAGS, TAGS)
def test_tags_have_the_same_hash_if_they_are_equal(one: Any, other: Any) -> None:
    assert (tag_hash(one) == tag_hash(other)) == (one == other)


def test_hashes_stay_what_they_are() -> None:
    # They must be the same in every process, whatever its seed of `hash`.
    digest = hashlib.blake2b(b'("layer 0",1,)', digest_size=8).digest()
    assert (
        tag_hash(("layer 0", 1)) == tag_hash(("layer 0", 1.0)) == int.from_bytes(digest, "little")
    )
    assert tag_hash(("a", "b")) != tag_hash(("a,b",)) != tag_hash("a")


@pytest.mark.parametrize("tag", [b"x", float("nan"), ("a", frozenset()), object()])
def test_other_tags_are_refused(tag: Any) -> None:
    with pytest.raises(ValueError, match="a tag is made of"):
        tag_hash(tag)


@given(st.binary(max_size=200))
def test_random_bytes(data: bytes) -> None:
    with pytest.raises(WireError):
        unpack(data, HEADERS)


@given(st.data())
def test_forged_bytes_only_raise_wire_errors(data: st.DataObject) -> None:
    message = data.draw(
        st.sampled_from(
            [torch.ones(2, 3), torch.ones(50_000), Framed(Plain("a", 1, 2.0)), Framed(Empty())]
        )
    )
    block = bytearray(pack(1, 2, message, HEADERS).block.numpy().tobytes())
    for _ in range(data.draw(st.integers(1, 4))):
        block[data.draw(st.integers(0, min(len(block), 150) - 1))] = data.draw(st.integers(0, 255))
    block = block[: data.draw(st.integers(0, len(block)))] if data.draw(st.booleans()) else block
    try:
        frame = unpack(bytes(block), HEADERS, max_nbytes=1 << 20)
    except WireError:
        return
    assert frame.nbytes <= 1 << 20
    frame.message(torch.zeros(frame.nbytes, dtype=torch.uint8))


def forged(shape: tuple[int, ...], nbytes: int) -> bytes:
    fixed = frames._FIXED.pack(b"GWFR", 1, 0, 0, len(shape), 0, 0, 0, nbytes, 0, 0, 0)
    return fixed + struct.pack(f"<{len(shape)}Q", *shape)


@pytest.mark.parametrize(
    ("shape", "nbytes"),
    [
        ((2**40,), 2**40),
        ((2**63, 2), 0),  # 2**64 bytes, which would be none in 64 bits
        ((0, 2**62), 0),
        ((50_000,), 49_999),
        ((1,) * 9, 1),
    ],
)
def test_declared_sizes_are_limited(shape: tuple[int, ...], nbytes: int) -> None:
    with pytest.raises(WireError):
        unpack(forged(shape, nbytes), HEADERS)


def test_what_cannot_be_sent() -> None:
    with pytest.raises(ValueError, match="too long"):
        pack(0, 0, Framed(Plain("a", 1, name="x" * BLOCK_NBYTES)), HEADERS)
    with pytest.raises(ValueError, match="complex"):
        pack(0, 0, torch.zeros(1, dtype=torch.complex64), HEADERS)
    with pytest.raises(ValueError, match="a tensor or a Framed"):
        pack(0, 0, b"bytes", HEADERS)


@pytest.mark.parametrize("data", [None, torch.arange(100.0), torch.arange(50_000.0)])
def test_longer_blocks(data: torch.Tensor | None) -> None:
    """For header objects; payloads lie inside only if all has room in a block as it is."""
    sent = Framed(Plain("a", 1, name="x" * 200_000), data)
    packed = pack(0, 0, sent, HEADERS, block_nbytes=1 << 20)
    assert (packed.payload is None) == (data is None)
    block = packed.block.numpy().tobytes()
    with pytest.raises(WireError, match=r"40 \.\. 32768 bytes"):
        unpack(block, HEADERS)
    frame = unpack(block, HEADERS, block_nbytes=1 << 20, is_exact=True)
    assert frame.header == sent.header
    assert frame.num_to_come == (0 if data is None else data.numel() * 4)


@pytest.mark.parametrize("message", [torch.ones(3), torch.ones(50_000), Framed(Empty())])
def test_a_block_that_is_exact_ends_with_its_frame(message: Any) -> None:
    block = pack(0, 0, message, HEADERS).block.numpy().tobytes()
    unpack(block, HEADERS, is_exact=True)
    unpack(block + b"\0", HEADERS)
    with pytest.raises(WireError, match="1 bytes behind its frame"):
        unpack(block + b"\0", HEADERS, is_exact=True)


def test_what_has_no_tensor_lies_nowhere() -> None:
    block = bytearray(bytes(frames.pack(0, 1, Framed(None), Headers()).block.numpy()))
    frames.unpack(bytes(block), Headers())
    block[36] = 1  # on an accelerator
    with pytest.raises(WireError, match="without a tensor"):
        frames.unpack(bytes(block), Headers())
