"""Canonical Huffman codes of at most 15 bits."""

import torch
from torch import Tensor

from gradwire.kernels._checks import check_count
from gradwire.kernels._dispatch import InTriton, pick
from gradwire.kernels.native import huffman as native
from gradwire.kernels.reference import huffman as reference

_triton = InTriton("huffman")


def huffman_lengths(counts: Tensor) -> Tensor:
    """Bits of each symbol's codeword (int64), at most 15; 0 for those that do not occur.

    `counts` are int64 [alphabet], of at most 2^15 symbols that do.
    """
    if counts.dtype != torch.int64 or counts.dim() != 1:
        raise ValueError(f"huffman_lengths takes int64 [alphabet], got {counts.dtype}")
    if int((counts > 0).sum()) > 2**15:
        raise ValueError(f"huffman_lengths takes 32768 symbols, got {int((counts > 0).sum())}")
    return pick(counts.device, native.huffman_lengths, reference.huffman_lengths)(counts)


def huffman_encode(symbols: Tensor, lengths: Tensor, num_bits: int) -> Tensor:
    """Codewords of these lengths for symbols (n >= 1) of any integer type, as uint8.

    There are at least two codewords, and all are `num_bits` long together.
    """
    _check("huffman_encode", lengths)
    run = pick(symbols.device, native.huffman_encode, reference.huffman_encode)
    return run(symbols.reshape(-1), lengths.to(symbols.device), num_bits)


def huffman_decode(packed: Tensor, lengths: Tensor, count: int) -> Tensor:
    """The inverse as int32 [count], for count >= 1; other bytes or lengths are a ValueError."""
    check_count("huffman_decode", "count - 1", count - 1)
    _check("huffman_decode", lengths)
    if packed.dtype != torch.uint8 or packed.dim() != 1:
        raise ValueError(f"huffman_decode takes uint8 [size], got {packed.dtype}")
    if packed.numel() < reference.head_bytes(count):
        raise ValueError(
            f"{packed.numel()} bytes are left for {reference.head_bytes(count)} bytes of chunk "
            "lengths"
        )
    run = pick(
        packed.device, native.huffman_decode, reference.huffman_decode, _triton.huffman_decode
    )
    return run(packed, lengths.to(packed.device), count)


def _check(operation: str, lengths: Tensor) -> None:
    if lengths.dtype != torch.int64 or lengths.dim() != 1 or lengths.numel() > 2**16:
        raise ValueError(f"{operation} takes int64 lengths of up to 65536 symbols")
