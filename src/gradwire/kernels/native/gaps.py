"""Rice's code of the gaps of a sorted set in C: the bytes and indices of reference/gaps.py.

If C refuses its input, the reference finds the reason and raises the error.
"""

import ctypes

import torch
from torch import Tensor

from gradwire.kernels.native._library import dense, load
from gradwire.kernels.reference import gaps as reference

_CPU = torch.device("cpu")


def measure_gaps(indices: Tensor, universe: int) -> tuple[int, list[int], list[int]]:
    indices = dense(indices)
    parameter, sums, lengths = ctypes.c_int64(), (ctypes.c_uint64 * 3)(), (ctypes.c_int64 * 64)()
    if load().gw_measure_gaps(
        indices.data_ptr(), indices.numel(), universe, ctypes.byref(parameter), sums, lengths
    ):
        raise reference.not_increasing_error(indices, universe)
    return parameter.value, sums[:], lengths[:]


def encode_rice(indices: Tensor, parameter: int, quotients: int) -> Tensor:
    indices = dense(indices)
    count = indices.numel()
    low_bytes, unary_bytes = -(-count * parameter // 8), -(-(count + quotients) // 8)
    packed = torch.empty(1 + low_bytes + unary_bytes, dtype=torch.uint8, device=_CPU)
    if load().gw_encode_rice(
        indices.data_ptr(), count, parameter, low_bytes, unary_bytes, packed.data_ptr()
    ):
        raise reference.quotients_error(quotients)
    return packed


def decode_rice(body: Tensor, parameter: int, universe: int, count: int) -> Tensor:
    body = dense(body)
    low_bytes = -(-count * parameter // 8)
    indices = torch.empty(count, dtype=torch.int64, device=_CPU)
    if not count or load().gw_decode_rice(
        body.data_ptr(),
        low_bytes,
        body.numel() - low_bytes,
        count,
        parameter,
        universe,
        indices.data_ptr(),
    ):
        return reference.decode_rice(body, parameter, universe, count)
    return indices
