"""The hot loops, behind one dispatch. Callers import from here, never from a backend.

Every function checks its arguments here, so backends may trust them, and returns a new flat
tensor on the device of its input. Bit streams are little-endian: bit b of a stream is bit
b % 8 of byte b // 8, and padding bits are zero.
"""

from typing import Literal

import torch
from torch import Tensor

from gradwire.kernels import _dispatch
from gradwire.kernels._dispatch import GradwireWarning
from gradwire.kernels.native import bits as _native_bits
from gradwire.kernels.native import philox as _native_philox
from gradwire.kernels.reference import bits as _bits
from gradwire.kernels.reference import philox as _philox

__all__ = [
    "GradwireWarning",
    "backend",
    "ones_positions",
    "pack_digits",
    "pack_ones",
    "pack_signs",
    "pack_uints",
    "philox_words",
    "unpack_digits",
    "unpack_signs",
    "unpack_uints",
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
    values = values.reshape(-1)
    if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < base:
        raise ValueError(f"pack_digits takes 0 .. {base - 1}, got {int(values.max())}")
    return _bits.pack_digits(values, base, digits)


def unpack_digits(packed: Tensor, base: int, digits: int, count: int) -> Tensor:
    """The inverse of `pack_digits`, as int32 [count]."""
    if packed.dtype != torch.uint8 or packed.numel() != -(-count // digits):
        raise ValueError(
            f"{count} digits of base {base} take {-(-count // digits)} bytes of uint8, got "
            f"{packed.numel()} of {packed.dtype}"
        )
    return _bits.unpack_digits(packed, base, digits, count)


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
