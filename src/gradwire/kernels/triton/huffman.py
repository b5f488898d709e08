"""Huffman codes: chunks are decoded side by side, a thread for each.

The encoder places codewords by prefix sums, for which torch's own operations do.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.reference import huffman as reference
from gradwire.kernels.triton._common import cdiv, launch

_CHUNKS = 32  # of a program


def huffman_decode(packed: Tensor, lengths: Tensor, count: int) -> Tensor:
    return reference.huffman_decode(packed, lengths, count, _walk)


def _walk(
    stream: Tensor, edges: Tensor, symbol_of: Tensor, lengths: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """The symbols of all chunks, and where each chunk's last codeword ends."""
    symbols = torch.empty(count, dtype=torch.int32, device=stream.device)
    ends = torch.empty_like(edges)
    launch(
        _walk_chunks,
        (cdiv(edges.numel(), _CHUNKS),),
        stream.contiguous(),
        stream.numel(),
        edges,
        edges.numel(),
        symbol_of.to(torch.int32),
        lengths[symbol_of].to(torch.int32),
        symbols,
        ends,
        count,
        min(count, reference.CHUNK),
        LIMIT=reference.LIMIT,
        CHUNK=reference.CHUNK,
        CHUNKS=_CHUNKS,
        num_warps=1,
        num_stages=1,
    )
    return symbols, ends


@triton.jit(do_not_specialize=["num_bytes", "num_chunks", "count", "steps"])
def _walk_chunks(
    stream,
    num_bytes,
    edges,
    num_chunks,
    symbol_of,
    length_of,
    symbols,
    ends,
    count,
    steps,
    LIMIT: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    chunk = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    first = chunk.to(tl.int64) * CHUNK
    beyond = 8 * tl.full((1,), 0, tl.int64) + 8 * num_bytes + 1  # where a damaged one stays
    place = tl.minimum(tl.load(edges + chunk, mask=chunk < num_chunks, other=0), beyond)
    for step in range(steps):
        here = first + step < count
        byte = place >> 3
        ahead = tl.load(stream + byte, mask=here & (byte < num_bytes), other=0).to(tl.int32) << 16
        for later in tl.static_range(1, 3):
            own = tl.load(stream + byte + later, mask=here & (byte + later < num_bytes), other=0)
            ahead = ahead | (own.to(tl.int32) << (16 - 8 * later))
        slot = (ahead >> (9 - (place & 7)).to(tl.int32)) & ((1 << LIMIT) - 1)
        tl.store(symbols + first + step, tl.load(symbol_of + slot, mask=here), mask=here)
        length = tl.load(length_of + slot, mask=here, other=0)
        place = tl.minimum(place + length, beyond)
    tl.store(ends + chunk, place, mask=chunk < num_chunks)
