"""Huffman codes in C: the bytes and symbols of reference/huffman.py, exactly."""

import torch
from torch import Tensor

from gradwire.kernels.native._library import dense, load
from gradwire.kernels.native.symbols import as_integers
from gradwire.kernels.reference import huffman as reference

_CPU = torch.device("cpu")


def huffman_lengths(counts: Tensor) -> Tensor:
    counts = dense(counts)
    lengths = torch.empty(counts.numel(), dtype=torch.int64, device=_CPU)
    if load().gw_huffman_lengths(counts.data_ptr(), counts.numel(), lengths.data_ptr()):
        raise MemoryError("huffman_lengths")
    return lengths


def huffman_encode(symbols: Tensor, lengths: Tensor, num_bits: int) -> Tensor:
    symbols, lengths = as_integers(symbols), dense(lengths)
    head_bytes = reference.head_bytes(symbols.numel())
    packed = torch.empty(head_bytes + -(-num_bits // 8), dtype=torch.uint8, device=_CPU)
    status = load().gw_huffman_encode(
        symbols.data_ptr(),
        symbols.element_size(),
        symbols.numel(),
        lengths.data_ptr(),
        lengths.numel(),
        head_bytes,
        num_bits,
        packed.data_ptr(),
    )
    if status == -2:
        raise MemoryError("huffman_encode")
    if status:
        raise (
            reference.invalid_lengths_error() if status == 2 else reference.codeword_error(num_bits)
        )
    return packed


def huffman_decode(packed: Tensor, lengths: Tensor, count: int) -> Tensor:
    packed, lengths = dense(packed), dense(lengths)
    head_bytes = reference.head_bytes(count)
    symbols = torch.empty(count, dtype=torch.int32, device=_CPU)
    status = load().gw_huffman_decode(
        packed.data_ptr(),
        head_bytes,
        packed.numel() - head_bytes,
        lengths.data_ptr(),
        lengths.numel(),
        count,
        symbols.data_ptr(),
    )
    if status == -2:
        raise MemoryError("huffman_decode")
    if status:
        reasons = {2: reference.invalid_lengths_error, 3: reference.padding_error}
        raise reasons.get(status, reference.chunk_end_error)()
    return symbols
