"""The hot loops, behind one dispatch. Callers import from here, never from a backend.

Every function checks its arguments here, so backends may trust them, and returns a new flat
tensor on the device of its input. Bit streams are little-endian: bit b of a stream is bit
b % 8 of byte b // 8, and padding bits are zero.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from gradwire.kernels import _dispatch
from gradwire.kernels._dispatch import GradwireWarning
from gradwire.kernels._pool import empty
from gradwire.kernels.native import bits as _native_bits
from gradwire.kernels.native import hadamard as _native_hadamard
from gradwire.kernels.native import halves as _native_halves
from gradwire.kernels.native import levels as _native_levels
from gradwire.kernels.native import philox as _native_philox
from gradwire.kernels.native import rans as _native_rans
from gradwire.kernels.native import selection as _native_selection
from gradwire.kernels.native import signs as _native_signs
from gradwire.kernels.native import strata as _native_strata
from gradwire.kernels.reference import bits as _bits
from gradwire.kernels.reference import hadamard as _hadamard
from gradwire.kernels.reference import halves as _halves
from gradwire.kernels.reference import levels as _levels
from gradwire.kernels.reference import philox as _philox
from gradwire.kernels.reference import rans as _rans
from gradwire.kernels.reference import selection as _selection
from gradwire.kernels.reference import signs as _signs
from gradwire.kernels.reference import strata as _strata

__all__ = [
    "GradwireWarning",
    "backend",
    "decode_levels",
    "empty",
    "encode_levels",
    "encode_signs",
    "fuses",
    "hadamard",
    "mean_magnitudes",
    "mean_signs",
    "narrow",
    "ones_positions",
    "pack_digits",
    "pack_ones",
    "pack_signs",
    "pack_uints",
    "philox_words",
    "rans_decode",
    "rans_encode",
    "rotated_signs",
    "row_norms",
    "select_above",
    "select_largest",
    "strata_positions",
    "strata_values",
    "unpack_digits",
    "unpack_signs",
    "unpack_uints",
    "unrotated_signs",
]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def backend() -> Literal["native", "reference"]:
    """What runs on CPU tensors, for reports; other devices run the reference."""
    return _dispatch.cpu_backend()


def philox_words(
    seed: int, stream: tuple[int, int, int], count: int, device: torch.device, first_block: int = 0
) -> Tensor:
    """`count` 32-bit words of a Philox 4x32-10 stream from a block on, as int32 [count].

    The 64-bit `seed` is the Philox key. Of the 128-bit counter the first word numbers the
    blocks of four words and wraps at 2^32, the other three are `stream`.
    """
    _check_count("philox_words", "count", count)
    run = _dispatch.pick(device, _native_philox.philox_words, _philox.philox_words)
    return run(seed, stream, count, device, first_block)


def pack_uints(values: Tensor, width: int) -> Tensor:
    """Integers in 0 .. 2^width - 1, `width` bits each, as uint8 [ceil(n * width / 8)].

    Value i occupies bits i * width .. (i + 1) * width - 1. Any integer type or bool will do;
    uint8, int32 and int64 need no copy. A value out of range is a ValueError.
    """
    _check_width("pack_uints", width)
    if values.dtype.is_floating_point or values.dtype.is_complex:
        raise ValueError(f"pack_uints takes integers, got {values.dtype}")
    run = _dispatch.pick(values.device, _native_bits.pack_uints, _bits.pack_uints)
    return run(values.reshape(-1), width)


def unpack_uints(packed: Tensor, width: int, count: int) -> Tensor:
    """The inverse of `pack_uints`, as int32 [count]; int64 at width 32, which int32 cannot hold.

    Padding bits are ignored.
    """
    _check_width("unpack_uints", width)
    _check_count("unpack_uints", "count", count)
    _check_packed("unpack_uints", packed, count * width)
    run = _dispatch.pick(packed.device, _native_bits.unpack_uints, _bits.unpack_uints)
    return run(packed.reshape(-1), width, count)


def pack_digits(values: Tensor, base: int, digits: int) -> Tensor:
    """Integers in 0 .. base - 1, `digits` of them in each byte, as uint8 [ceil(n / digits)].

    The first of a byte is its least significant digit. A value out of range is a ValueError.
    """
    if base < 2 or base**digits > 256:
        raise ValueError(f"{digits} digits of base {base} do not fit into a byte")
    run = _dispatch.pick(values.device, _native_bits.pack_digits, _bits.pack_digits)
    return run(values.reshape(-1), base, digits)


def unpack_digits(packed: Tensor, base: int, digits: int, count: int) -> Tensor:
    """The inverse of `pack_digits`, as int32 [count]."""
    if packed.dtype != torch.uint8 or packed.numel() != -(-count // digits):
        raise ValueError(
            f"{count} digits of base {base} take {-(-count // digits)} bytes of uint8, got "
            f"{packed.numel()} of {packed.dtype}"
        )
    run = _dispatch.pick(packed.device, _native_bits.unpack_digits, _bits.unpack_digits)
    return run(packed.reshape(-1), base, digits, count)


def pack_signs(x: Tensor) -> Tensor:
    """One bit per element, 1 where x < 0 (so 0 for both zeros and for NaN), as uint8."""
    if x.dtype not in _FLOATS:
        raise ValueError(f"pack_signs takes {_names(_FLOATS)}, got {x.dtype}")
    run = _dispatch.pick(x.device, _native_bits.pack_signs, _bits.pack_signs)
    return run(x.reshape(-1))


def unpack_signs(packed: Tensor, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """-1 where the bit is 1 and +1 where it is 0, as `dtype` [count]; padding is ignored."""
    if dtype not in _FLOATS:
        raise ValueError(f"unpack_signs makes {_names(_FLOATS)}, not {dtype}")
    _check_count("unpack_signs", "count", count)
    _check_packed("unpack_signs", packed, count)
    run = _dispatch.pick(packed.device, _native_bits.unpack_signs, _bits.unpack_signs)
    return run(packed.reshape(-1), count, dtype)


def ones_positions(packed: Tensor, num_bits: int) -> Tensor:
    """Where the first `num_bits` bits are one, ascending, as int64; padding is ignored."""
    _check_count("ones_positions", "num_bits", num_bits)
    _check_packed("ones_positions", packed, num_bits)
    run = _dispatch.pick(packed.device, _native_bits.ones_positions, _bits.ones_positions)
    return run(packed.reshape(-1), num_bits)


def pack_ones(positions: Tensor, num_bits: int) -> Tensor:
    """A bitmap of `num_bits` bits with ones at `positions` (int64), as uint8.

    The inverse of `ones_positions` if they ascend; order and repetition do not matter. A
    position outside 0 .. num_bits - 1 is a ValueError.
    """
    _check_count("pack_ones", "num_bits", num_bits)
    if positions.dtype != torch.int64:
        raise ValueError(f"pack_ones takes int64 positions, got {positions.dtype}")
    run = _dispatch.pick(positions.device, _native_bits.pack_ones, _bits.pack_ones)
    return run(positions.reshape(-1), num_bits)


def fuses(*tensors: Tensor | None) -> bool:
    """Whether the fused kernels below run in C on these: float32 on the CPU, library loaded.

    They are there for speed alone; for everything else codecs compose torch operations.
    """
    return backend() == "native" and all(
        x is None or (x.dtype == torch.float32 and x.device.type == "cpu") for x in tensors
    )


def mean_magnitudes(x: Tensor, bucket: int) -> Tensor:
    """The mean of |x| over each bucket, float64 [num_buckets]: the same bits on every device."""
    return _signs.mean_magnitudes(x.reshape(-1), bucket)


def encode_signs(
    x: Tensor, residual: Tensor | None, bucket: int, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mean magnitudes [num_buckets] and packed signs of x + residual; float32, in one pass.

    `out`, if given, gets what is lost: x + residual - scale * sign. It must not be one of the
    inputs. `bucket` is a multiple of eight, or no less than the number of elements. A scale is
    infinite or NaN where an element is.
    """
    _check_fused("encode_signs", x, residual, out)
    if bucket % 8 and bucket < x.numel():
        raise ValueError(f"encode_signs takes buckets of a multiple of 8, got {bucket}")
    run = _dispatch.pick(x.device, _native_signs.encode_signs, _signs.encode_signs)
    return run(x.reshape(-1), _flat(residual), bucket, out)


def mean_signs(
    packed: Sequence[Tensor],
    scale: Sequence[Tensor],
    count: int,
    bucket: int,
    out: Tensor | None = None,
) -> Tensor:
    """The mean of what payloads of `encode_signs` decode to, added in order, float32 [count]."""
    if not packed or len(packed) != len(scale):
        raise ValueError(f"mean_signs: {len(packed)} packed vectors, {len(scale)} scales")
    if bucket < 1 or (bucket % 8 and bucket < count):
        raise ValueError(f"mean_signs takes buckets of a multiple of 8, got {bucket}")
    for bits, each in zip(packed, scale):
        _check_packed("mean_signs", bits, count)
        _check_scale("mean_signs", each, count, bucket)
    _check_out("mean_signs", out, count)
    run = _dispatch.pick(packed[0].device, _native_signs.mean_signs, _signs.mean_signs)
    return run(packed, scale, count, bucket, out)


def encode_levels(
    x: Tensor,
    residual: Tensor | None,
    num_levels: int,
    bucket: int,
    width: int,
    seed: int,
    stream: tuple[int, int, int],
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Maxima [num_buckets] and packed levels of x + residual, rounded at random; float32.

    Level s + l means l / s times the maximum of the bucket, for -s <= l <= s = `num_levels`. `out`
    gets what is lost, as in `encode_signs`. The random bits are a Philox stream, 16 for each
    element. A scale is infinite or NaN if an element is.
    """
    _check_fused("encode_levels", x, residual, out)
    _check_levels("encode_levels", num_levels, bucket, width)
    run = _dispatch.pick(x.device, _native_levels.encode_levels, _levels.encode_levels)
    return run(x.reshape(-1), _flat(residual), num_levels, bucket, width, seed, stream, out)


def decode_levels(
    packed: Tensor,
    scale: Tensor,
    num_levels: int,
    bucket: int,
    width: int,
    count: int,
    out: Tensor | None = None,
) -> tuple[Tensor, int]:
    """What `encode_levels` encoded, but for what was lost: float32 [count]; the highest symbol.

    Symbols above 2 * num_levels are none that `encode_levels` makes; the caller must look.
    """
    _check_levels("decode_levels", num_levels, bucket, width)
    _check_packed("decode_levels", packed, count * width)
    _check_scale("decode_levels", scale, count, bucket)
    _check_out("decode_levels", out, count)
    run = _dispatch.pick(packed.device, _native_levels.decode_levels, _levels.decode_levels)
    return run(packed, scale, num_levels, bucket, width, count, out)


def select_largest(
    x: Tensor, residual: Tensor | None, count: int, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Ascending positions (int64) and values of the `count` largest magnitudes of x + residual.

    Of equal ones the first. `out` gets the others, with zeros where elements were taken; it must
    not be one of the inputs. NaN is larger than any number.
    """
    if not 0 <= count <= x.numel():
        raise ValueError(f"select_largest: {count} of {x.numel()} elements")
    if not fuses(x, residual, out):
        return _selection.select_largest(x.reshape(-1), _flat(residual), count, out)
    _check_fused("select_largest", x, residual, out)
    return _native_selection.select_largest(x.reshape(-1), _flat(residual), count, out)


def select_above(
    x: Tensor,
    residual: Tensor | None,
    threshold: float,
    capacity: int = 4096,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Ascending positions and values of magnitudes of x + residual of at least `threshold`.

    As `select_largest`. If more than `capacity` are found it takes a second pass.
    """
    if not threshold >= 0:
        raise ValueError(f"select_above takes a threshold of at least 0, got {threshold}")
    if not fuses(x, residual, out):
        return _selection.select_above(x.reshape(-1), _flat(residual), threshold, capacity, out)
    _check_fused("select_above", x, residual, out)
    return _native_selection.select_above(
        x.reshape(-1), _flat(residual), threshold, max(0, capacity), out
    )


def strata_positions(
    numel: int, count: int, seed: int, stream: tuple[int, int, int], device: torch.device
) -> Tensor:
    """A random position in each of `count` equal strata of 0 .. numel - 1, int64, ascending."""
    if not 0 <= count <= numel:
        raise ValueError(f"strata_positions: {count} strata of {numel} elements")
    run = _dispatch.pick(device, _native_strata.strata_positions, _strata.strata_positions)
    return run(numel, count, seed, stream, device)


def strata_values(
    x: Tensor, count: int, seed: int, stream: tuple[int, int, int], scaled: bool = False
) -> Tensor:
    """The elements at `strata_positions`; `scaled` multiplies each by the size of its stratum."""
    if not 0 <= count <= x.numel():
        raise ValueError(f"strata_values: {count} strata of {x.numel()} elements")
    run = _native_strata.strata_values if fuses(x) else _strata.strata_values
    return run(x.reshape(-1), count, seed, stream, scaled)


def narrow(x: Tensor, out: Tensor) -> bool:
    """Rounds float32 into `out`, float16 or bfloat16, saturating; whether x was finite."""
    if x.dtype != torch.float32 or out.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"narrow takes float32 to a 16-bit float, got {x.dtype} to {out.dtype}")
    if out.numel() != x.numel() or not out.is_contiguous() or out.device != x.device:
        raise ValueError(f"narrow needs {x.numel()} contiguous elements for its result")
    run = _dispatch.pick(x.device, _native_halves.narrow, _halves.narrow)
    return run(x.reshape(-1), out.view(-1))


def _flat(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.reshape(-1)


def _check_fused(operation: str, x: Tensor, residual: Tensor | None, out: Tensor | None) -> None:
    for tensor in (x, residual):
        if tensor is not None and (
            tensor.dtype != torch.float32
            or tensor.numel() != x.numel()
            or tensor.device != x.device
        ):
            raise ValueError(
                f"{operation} takes float32 of equal length on one device, got {x.numel()} x "
                f"{x.dtype} and {tensor.numel()} x {tensor.dtype}"
            )
    _check_out(operation, out, x.numel())
    if (
        out is not None
        and out.numel()
        and out.data_ptr()
        in (
            x.data_ptr(),
            0 if residual is None else residual.data_ptr(),
        )
    ):
        raise ValueError(f"{operation} cannot write its result over an input")


def _check_out(operation: str, out: Tensor | None, numel: int) -> None:
    if out is not None and (
        out.dtype != torch.float32 or out.shape != (numel,) or not out.is_contiguous()
    ):
        raise ValueError(
            f"{operation} needs a contiguous float32 [{numel}] for its result, got {out.dtype} "
            f"{list(out.shape)}"
        )


def _check_scale(operation: str, scale: Tensor, count: int, bucket: int) -> None:
    if scale.dtype != torch.float32 or scale.numel() != -(-count // bucket):
        raise ValueError(
            f"{operation} takes {-(-count // bucket)} scales of float32, got {scale.numel()} of "
            f"{scale.dtype}"
        )


def _check_levels(operation: str, num_levels: int, bucket: int, width: int) -> None:
    if not 1 <= num_levels < 128 or not 2 * num_levels < 1 << width <= 256:
        raise ValueError(f"{operation}: {num_levels} levels at {width} bits; at most 8 bits")
    if bucket < 1 or bucket % 8:
        raise ValueError(f"{operation} takes buckets of a multiple of 8, got {bucket}")


def hadamard(
    x: Tensor,
    before: Tensor | None = None,
    after: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The orthonormal Walsh-Hadamard transform of each row of [rows, 2^k]; its own inverse.

    float32 or float64. `before` and `after` are packed bits (uint8), one per element, row after
    row: where a bit is 1 the sign of that element is flipped before or after the transform.
    The result goes to `out`, which may be x itself, if given. Backends agree to the bit.
    """
    _check_rows("hadamard", x)
    for flips in (before, after):
        if flips is not None:
            _check_packed("hadamard", flips, x.numel())
    _check_rows_out("hadamard", out, tuple(x.shape), x)
    run = _dispatch.pick(x.device, _native_hadamard.hadamard, _hadamard.hadamard)
    return run(x, before, after, out)


def row_norms(y: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of |y| and of y^2 over each row of [rows, n], float64: the same bits on every device."""
    return _hadamard.row_norms(y)


def rotated_signs(x: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y = `hadamard(x, before)` as packed bits, 1 where y >= 0, and the `row_norms` of y."""
    _check_rows("rotated_signs", x)
    _check_packed("rotated_signs", before, x.numel())
    run = _dispatch.pick(x.device, _native_hadamard.rotated_signs, _hadamard.rotated_signs)
    return run(x, before)


def unrotated_signs(
    packed: Tensor, scale: Tensor, n: int, after: Tensor, out: Tensor | None = None
) -> Tensor:
    """`hadamard(y, after=after)` of rows of n: scale[row] where the bit is 1, else minus that."""
    for bits in (packed, after):
        _check_packed("unrotated_signs", bits, len(scale) * n)
    _check_rows_out("unrotated_signs", out, (len(scale), n), scale)
    run = _dispatch.pick(packed.device, _native_hadamard.unrotated_signs, _hadamard.unrotated_signs)
    return run(packed, scale, n, after, out)


def _check_rows_out(
    operation: str, out: Tensor | None, shape: tuple[int, ...], like: Tensor
) -> None:
    if out is not None and (
        tuple(out.shape) != shape
        or (out.dtype, out.device) != (like.dtype, like.device)
        or not out.is_contiguous()
    ):
        raise ValueError(
            f"{operation}: out must be contiguous {list(shape)} of {like.dtype}, got "
            f"{list(out.shape)} of {out.dtype}"
        )


def _check_rows(operation: str, x: Tensor) -> None:
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{operation} takes float32 or float64, got {x.dtype}")
    if x.dim() != 2 or x.shape[1] < 1 or x.shape[1] & (x.shape[1] - 1):
        raise ValueError(f"{operation} takes rows of 2^k elements, got a tensor of {list(x.shape)}")


def rans_encode(symbols: Tensor, frequencies: Tensor, precision: int, lanes: int) -> Tensor:
    """Symbols as an interleaved rANS code (uint8); frequencies add up to 2^precision.

    `frequencies[s]` is that of symbol s, positive for each symbol that occurs.
    """
    _check_frequencies("rans_encode", frequencies, precision, lanes)
    run = _dispatch.pick(symbols.device, _native_rans.rans_encode, _rans.rans_encode)
    return run(symbols.reshape(-1), frequencies.to(symbols.device), precision, lanes)


def rans_decode(
    packed: Tensor, frequencies: Tensor, precision: int, lanes: int, count: int
) -> Tensor:
    """The inverse of `rans_encode`, as int32 [count]; ValueError for bytes that are no code."""
    _check_count("rans_decode", "count", count)
    _check_frequencies("rans_decode", frequencies, precision, lanes)
    if packed.dtype != torch.uint8 or packed.numel() < 4 * lanes or packed.numel() % 2:
        raise ValueError(
            f"rans_decode takes {4 * lanes} bytes of states and two for each word, got "
            f"{packed.numel()} of {packed.dtype}"
        )
    packed = packed.reshape(-1)
    if not bool((packed[: 4 * lanes].reshape(lanes, 4)[:, 2:] > 0).any(dim=1).all()):
        raise ValueError("rans_decode: a state below 2^16")
    run = _dispatch.pick(packed.device, _native_rans.rans_decode, _rans.rans_decode)
    return run(packed, frequencies.to(packed.device), precision, lanes, count)


def _check_frequencies(operation: str, frequencies: Tensor, precision: int, lanes: int) -> None:
    if not 1 <= precision <= 15:
        raise ValueError(f"{operation} takes a precision of 1 .. 15 bits, got {precision}")
    if not 1 <= lanes <= 2**15:
        raise ValueError(f"{operation} takes 1 .. 32768 lanes, got {lanes}")
    total = int(frequencies.sum())
    if frequencies.dim() != 1 or total != 1 << precision or int(frequencies.min()) < 0:
        raise ValueError(
            f"{operation}: frequencies must add up to {1 << precision}, got {total} with a "
            f"least of {int(frequencies.min()) if frequencies.numel() else 'none'}"
        )
    if frequencies.numel() > 2**16:
        raise ValueError(f"{operation} takes at most 65536 symbols, got {frequencies.numel()}")


def _check_width(operation: str, width: int) -> None:
    if not 1 <= width <= 32:
        raise ValueError(f"{operation} takes a width of 1 .. 32 bits, got {width}")


def _check_count(operation: str, name: str, count: int) -> None:
    if count < 0:
        raise ValueError(f"{operation} needs {name} >= 0, got {count}")


def _check_packed(operation: str, packed: Tensor, num_bits: int) -> None:
    if packed.dtype != torch.uint8:
        raise ValueError(f"{operation} takes packed bits as uint8, got {packed.dtype}")
    expected = -(-num_bits // 8)
    if packed.numel() != expected:
        raise ValueError(
            f"{operation} expects {expected} bytes for {num_bits} bits, got {packed.numel()}"
        )


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
