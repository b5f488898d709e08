"""The wire format of `dq`: a first byte that names the code, and that code.

    trellis   the step; if the first byte says so six offsets of four bits each; the tables (see
              `coding/trellis.py`); for all segments but the last the number of words of each, 4
              bytes; the words of all segments
    plane     the same, with the plane (see `coding/plane.py`) between tables and segments
    short     see `_dq_short_codes.py`
    nothing   all is zero

A vector beyond the range of the arithmetic travels as one within, a fixed power of two larger or
smaller (`SHIFT`), and the first byte says so. Nothing else depends on it.
"""

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.coding.plane import decode_plane
from gradwire.coding.trellis import Tables, read_tables, to_bytes
from gradwire.compression.quantization._powers import times_power
from gradwire.compression.source_coding._dq_short_codes import (
    PEAKS,
    PLAIN,
    decode_peaks,
    decode_plain,
    from_short_float,
    read_two_bytes,
    to_short_float,
)
from gradwire.core.codec import clamp_to, scale_dtype
from gradwire.core.errors import WireError
from gradwire.core.spec import Spec
from gradwire.kernels.reference.trellis import UNIT
from gradwire.kernels.reference.trellis_fit import FINE

Shapes = tuple[tuple[int, int], ...]  # of the matrices in a vector, rows and columns

# The first byte: zero, a sum of these flags, or that of a short code.
NOTHING, CODED, OFFSETS, SIGNED, SMALL, PLANE, LARGE = 0, 1, 2, 4, 8, 64, 128
NO_OFFSETS = torch.zeros(6, dtype=torch.int32, device="cpu")
_SEGMENT_NUMEL = 1 << 18  # elements coded by themselves, in long vectors
_MAX_SEGMENTS = 256
_SHORT_STEP_NUMEL = 1024  # elements up to which two bytes will do for a step
SHIFT = {torch.float32: 128, torch.float64: 700}  # exponents between a vector and what travels


def write_header(
    step: Tensor,
    numel: int,
    tables: Tables,
    offsets: Tensor,
    signed: bool,
    plane: Tensor | None,
) -> bytearray:
    """The front of a trellis code, up to the lengths of its segments."""
    nibbles = [offset // FINE & 15 for offset in offsets.tolist()]
    code = bytearray([CODED + (OFFSETS if any(nibbles) else 0) + (SIGNED if signed else 0)])
    code[0] += 0 if plane is None else PLANE
    if step_bytes(numel, step.dtype) == 2:
        code += to_short_float(float(step), step.dtype).to_bytes(2, "little")
    else:
        code += step.reshape(1).numpy().tobytes()
    if any(nibbles):
        code += bytes(a | b << 4 for a, b in zip(nibbles[::2], nibbles[1::2]))
    code += to_bytes(tables.bits)
    return code if plane is None else code + plane.numpy().tobytes()


def decode_code(packed: Tensor, shapes: Shapes, spec: Spec) -> Tensor:
    if not packed.numel():
        raise WireError("code: no bytes")
    kind, dtype = int(packed[0]), scale_dtype(spec.dtype)
    if kind == NOTHING and packed.numel() == 1:
        return torch.zeros(spec.numel, dtype=spec.dtype, device="cpu")
    if kind & (SMALL | LARGE):
        inner = packed.clone()
        inner[0] = kind & ~(SMALL | LARGE)
        if (kind & SMALL and kind & LARGE) or not inner[0]:
            raise WireError(f"code: kind {kind} in {packed.numel()} bytes")
        shifted = decode_code(inner, shapes, Spec((spec.numel,), dtype))
        exponent = SHIFT[dtype] if kind & LARGE else -SHIFT[dtype]
        return clamp_to(times_power(shifted, exponent), spec.dtype)
    if kind == PEAKS and spec.numel:
        return clamp_to(decode_peaks(packed, spec.numel, dtype), spec.dtype)
    if kind == PLAIN and spec.numel:
        return clamp_to(decode_plain(packed, spec.numel, dtype), spec.dtype)
    size = step_bytes(spec.numel, dtype)
    front = 1 + size + (3 if kind & OFFSETS else 0)
    known = CODED + (kind & OFFSETS) + (kind & PLANE or kind & SIGNED)
    if kind != known or not spec.numel or packed.numel() < front:
        raise WireError(f"code: kind {kind} in {packed.numel()} bytes of {spec.numel} elements")
    if size == 2:
        step = from_short_float(read_two_bytes(packed[1:3]), dtype)
    else:
        step = packed[1 : 1 + size].clone().view(dtype)
    if not bool((step > 0) & torch.isfinite(step)):
        raise WireError("code: a step that is not positive and finite")
    offsets = [0] * 6
    if kind & OFFSETS:
        nibbles = [n for byte in packed[front - 3 : front].tolist() for n in (byte & 15, byte >> 4)]
        offsets = [FINE * ((n ^ 8) - 8) for n in nibbles]
    tables, used = read_tables(packed[front:])
    front += used
    plane = None
    if kind & PLANE:
        plane, used = decode_plane(packed[front:], spec.numel)
        front += used
    segments = num_segments(spec.numel)
    streams = front + 4 * (segments - 1)
    if packed.numel() < streams or (packed.numel() - streams) % 2:
        raise WireError(f"code: {packed.numel()} bytes for {segments} segments")
    lengths = packed[front:streams].clone().view(torch.int32).to(torch.int64)
    last = (packed.numel() - streams) // 2 - int(lengths.sum())
    lengths = torch.cat([lengths, torch.tensor([last], device="cpu")])
    if int(lengths.min()) < 2:
        raise WireError(f"code: a segment of {int(lengths.min())} words")
    try:
        values = kernels.trellis_decode(
            packed[streams:],
            lengths,
            tables.halves(),
            tables.tails(),
            torch.tensor(offsets, dtype=torch.int32, device="cpu"),
            torch.tensor(shapes, dtype=torch.int64, device="cpu"),
            spec.numel,
            bool(kind & SIGNED),
            plane,
        )
    except ValueError as error:
        raise WireError(str(error)) from None
    return clamp_to(values.to(dtype).mul_(step / UNIT), spec.dtype)


def num_segments(numel: int) -> int:
    return min(max(1, numel // _SEGMENT_NUMEL), _MAX_SEGMENTS)


def step_bytes(numel: int, dtype: torch.dtype) -> int:
    return 2 if numel <= _SHORT_STEP_NUMEL else dtype.itemsize
