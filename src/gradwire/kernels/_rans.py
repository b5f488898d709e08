"""Interleaved rANS."""

import torch
from torch import Tensor

from gradwire.kernels._checks import check_count
from gradwire.kernels._dispatch import InTriton, pick
from gradwire.kernels.native import rans as native
from gradwire.kernels.reference import rans as reference

_triton = InTriton("rans")


def rans_encode(symbols: Tensor, frequencies: Tensor, precision: int, lanes: int) -> Tensor:
    """Symbols as an interleaved rANS code (uint8); frequencies add up to 2^precision.

    `frequencies[s]` is that of symbol s, positive for each symbol that occurs.
    """
    _check_frequencies("rans_encode", frequencies, precision, lanes)
    run = pick(symbols.device, native.rans_encode, reference.rans_encode, _triton.rans_encode)
    return run(symbols.reshape(-1), frequencies.to(symbols.device), precision, lanes)


def rans_decode(
    packed: Tensor, frequencies: Tensor, precision: int, lanes: int, count: int
) -> Tensor:
    """The inverse of `rans_encode`, as int32 [count]; ValueError for bytes that are no code."""
    check_count("rans_decode", "count", count)
    _check_frequencies("rans_decode", frequencies, precision, lanes)
    if packed.dtype != torch.uint8 or packed.numel() < 4 * lanes or packed.numel() % 2:
        raise ValueError(
            f"rans_decode takes {4 * lanes} bytes of states and two for each word, got "
            f"{packed.numel()} of {packed.dtype}"
        )
    packed = packed.reshape(-1)
    if not bool((packed[: 4 * lanes].reshape(lanes, 4)[:, 2:] > 0).any(dim=1).all()):
        raise ValueError("rans_decode: a state below 2^16")
    run = pick(packed.device, native.rans_decode, reference.rans_decode, _triton.rans_decode)
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
