"""Integers, digits, signs and positions as packed bits, and back."""

import torch
from torch import Tensor

from gradwire.kernels._checks import check_count, check_packed
from gradwire.kernels._dispatch import InTriton, pick
from gradwire.kernels.native import bits as native
from gradwire.kernels.reference import bits as reference

_triton = InTriton("bits")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def pack_uints(values: Tensor, width: int) -> Tensor:
    """Integers in 0 .. 2^width - 1, `width` bits each, as uint8 [ceil(n * width / 8)].

    Value i occupies bits i * width .. (i + 1) * width - 1. Any integer type or bool will do;
    uint8, int32 and int64 need no copy. A value out of range is a ValueError.
    """
    _check_width("pack_uints", width)
    if values.dtype.is_floating_point or values.dtype.is_complex:
        raise ValueError(f"pack_uints takes integers, got {values.dtype}")
    run = pick(values.device, native.pack_uints, reference.pack_uints, _triton.pack_uints)
    return run(values.reshape(-1), width)


def unpack_uints(packed: Tensor, width: int, count: int) -> Tensor:
    """The inverse of `pack_uints`, as int32 [count]; int64 at width 32, which int32 cannot hold.

    Padding bits are ignored.
    """
    _check_width("unpack_uints", width)
    check_count("unpack_uints", "count", count)
    check_packed("unpack_uints", packed, count * width)
    run = pick(packed.device, native.unpack_uints, reference.unpack_uints, _triton.unpack_uints)
    return run(packed.reshape(-1), width, count)


def pack_digits(values: Tensor, base: int, digits: int) -> Tensor:
    """Integers in 0 .. base - 1, `digits` of them in each byte, as uint8 [ceil(n / digits)].

    The first of a byte is its least significant digit. A value out of range is a ValueError.
    """
    if base < 2 or base**digits > 256:
        raise ValueError(f"{digits} digits of base {base} do not fit into a byte")
    run = pick(values.device, native.pack_digits, reference.pack_digits, _triton.pack_digits)
    return run(values.reshape(-1), base, digits)


def unpack_digits(packed: Tensor, base: int, digits: int, count: int) -> Tensor:
    """The inverse of `pack_digits`, as int32 [count]."""
    if packed.dtype != torch.uint8 or packed.numel() != -(-count // digits):
        raise ValueError(
            f"{count} digits of base {base} take {-(-count // digits)} bytes of uint8, got "
            f"{packed.numel()} of {packed.dtype}"
        )
    run = pick(packed.device, native.unpack_digits, reference.unpack_digits, _triton.unpack_digits)
    return run(packed.reshape(-1), base, digits, count)


def pack_signs(x: Tensor) -> Tensor:
    """One bit per element, 1 where x < 0 (so 0 for both zeros and for NaN), as uint8."""
    if x.dtype not in _FLOATS:
        raise ValueError(f"pack_signs takes {_names(_FLOATS)}, got {x.dtype}")
    run = pick(x.device, native.pack_signs, reference.pack_signs, _triton.pack_signs)
    return run(x.reshape(-1))


def unpack_signs(packed: Tensor, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """-1 where the bit is 1 and +1 where it is 0, as `dtype` [count]; padding is ignored."""
    if dtype not in _FLOATS:
        raise ValueError(f"unpack_signs makes {_names(_FLOATS)}, not {dtype}")
    check_count("unpack_signs", "count", count)
    check_packed("unpack_signs", packed, count)
    run = pick(packed.device, native.unpack_signs, reference.unpack_signs, _triton.unpack_signs)
    return run(packed.reshape(-1), count, dtype)


def ones_positions(packed: Tensor, num_bits: int) -> Tensor:
    """Where the first `num_bits` bits are one, ascending, as int64; padding is ignored."""
    check_count("ones_positions", "num_bits", num_bits)
    check_packed("ones_positions", packed, num_bits)
    run = pick(
        packed.device, native.ones_positions, reference.ones_positions, _triton.ones_positions
    )
    return run(packed.reshape(-1), num_bits)


def pack_ones(positions: Tensor, num_bits: int) -> Tensor:
    """A bitmap of `num_bits` bits with ones at `positions` (int64), as uint8.

    The inverse of `ones_positions` if they ascend; order and repetition do not matter. A
    position outside 0 .. num_bits - 1 is a ValueError.
    """
    check_count("pack_ones", "num_bits", num_bits)
    if positions.dtype != torch.int64:
        raise ValueError(f"pack_ones takes int64 positions, got {positions.dtype}")
    run = pick(positions.device, native.pack_ones, reference.pack_ones, _triton.pack_ones)
    return run(positions.reshape(-1), num_bits)


def _check_width(operation: str, width: int) -> None:
    if not 1 <= width <= 32:
        raise ValueError(f"{operation} takes a width of 1 .. 32 bits, got {width}")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
