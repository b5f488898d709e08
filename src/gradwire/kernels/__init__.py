"""The hot loops, behind one dispatch. Callers import from here, never from a backend.

Every function checks its arguments here, so backends may trust them, and returns a new flat
tensor on the device of its input. Bit streams are little-endian: bit b of a stream is bit
b % 8 of byte b // 8, and padding bits are zero.
"""

from typing import Literal

from gradwire.kernels._bits import (
    ones_positions,
    pack_digits,
    pack_ones,
    pack_signs,
    pack_uints,
    unpack_digits,
    unpack_signs,
    unpack_uints,
)
from gradwire.kernels._checks import fuses
from gradwire.kernels._dispatch import GradwireWarning, cpu_backend
from gradwire.kernels._hadamard import hadamard, rotated_signs, row_norms, unrotated_signs
from gradwire.kernels._halves import narrow
from gradwire.kernels._levels import decode_levels, encode_levels
from gradwire.kernels._philox import philox_words
from gradwire.kernels._pool import empty
from gradwire.kernels._rans import rans_decode, rans_encode
from gradwire.kernels._selection import select_above, select_largest
from gradwire.kernels._signs import encode_signs, mean_magnitudes, mean_signs
from gradwire.kernels._strata import strata_positions, strata_values

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


def backend() -> Literal["native", "reference"]:
    """What runs on CPU tensors, for reports; other devices run the reference."""
    return cpu_backend()
