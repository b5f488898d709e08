"""Interleaved rANS in C: the bytes and symbols of reference/rans.py, exactly."""

import torch
from torch import Tensor

from gradwire.kernels.native._library import dense, load
from gradwire.kernels.reference.rans import invalid_code_error, missing_frequency_error

_CPU = torch.device("cpu")


def rans_encode(symbols: Tensor, frequencies: Tensor, precision: int, lanes: int) -> Tensor:
    symbols, frequencies = dense(symbols.to(torch.int32)), dense(frequencies.to(torch.int32))
    count = symbols.numel()
    states = torch.empty(lanes, dtype=torch.int32, device=_CPU)
    words = torch.empty(count + 1, dtype=torch.int16, device=_CPU)
    num_words = load().gw_rans_encode(
        symbols.data_ptr(),
        count,
        frequencies.data_ptr(),
        frequencies.numel(),
        precision,
        lanes,
        states.data_ptr(),
        words.data_ptr(),
    )
    if num_words < 0:
        raise MemoryError("rans_encode") if num_words == -2 else missing_frequency_error(symbols)
    written = words[count + 1 - num_words :].view(torch.uint8)
    return torch.cat([states.view(torch.uint8), written])


def rans_decode(
    packed: Tensor, frequencies: Tensor, precision: int, lanes: int, count: int
) -> Tensor:
    frequencies = dense(frequencies.to(torch.int32))
    states = packed[: 4 * lanes].clone().view(torch.int32)
    words = packed[4 * lanes :]
    if words.data_ptr() % 2 or not words.is_contiguous():
        words = words.clone(memory_format=torch.contiguous_format)
    symbols = torch.empty(count, dtype=torch.int32, device=_CPU)
    status = load().gw_rans_decode(
        words.data_ptr(),
        words.numel() // 2,
        states.data_ptr(),
        frequencies.data_ptr(),
        frequencies.numel(),
        precision,
        lanes,
        count,
        symbols.data_ptr(),
    )
    if status:
        raise MemoryError("rans_decode") if status == -2 else invalid_code_error()
    return symbols
