"""Canonical Huffman codes of symbols (Huffman 1952), of at most 15 bits.

Lengths are optimal among codes so limited (package-merge, Larmore and Hirschberg 1990), and
decide the codewords: they count upwards from the shorter to the longer, symbols of equal length in
their own order.

    the bits of every chunk of 2048 symbols but the last chunk, 15 bits each, little-endian;
    the codewords, highest bit first

Knowing where chunks start a decoder takes one symbol of each at a time, so there are at most 2048
steps however long the message.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.kernels.reference.bits import pack_uints, unpack_uints

LIMIT = 15  # bits of the longest codeword
CHUNK = 2048  # symbols; the bits of a chunk fit 15 bits
_CHUNK_BITS = (LIMIT * CHUNK).bit_length()
Walk = Callable[[Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]  # see `_walk`


def invalid_lengths_error() -> ValueError:
    return ValueError("codeword lengths that no Huffman code has")


def chunk_end_error() -> ValueError:
    return ValueError("Huffman codewords that do not end where they should")


def padding_error() -> ValueError:
    return ValueError("ones behind the last Huffman codeword or chunk length")


def codeword_error(num_bits: int) -> ValueError:
    return ValueError(f"huffman_encode: symbols without a codeword, or other than {num_bits} bits")


def head_bytes(count: int) -> int:
    """Bytes of the chunk lengths of so many symbols."""
    return -(-((count - 1) // CHUNK) * _CHUNK_BITS // 8)


def huffman_lengths(counts: Tensor) -> Tensor:
    occurring = sorted((count, symbol) for symbol, count in enumerate(counts.tolist()) if count)
    weights = [count for count, _ in occurring]
    # Package-merge: each level offers the symbols and pairs of the level before; 2n - 2 of the
    # lightest of the last level are bought, and a symbol's length is how often it was.
    levels: list[list[bool]] = []
    items = weights
    for level in range(LIMIT):
        pairs = [a + b for a, b in zip(items[::2], items[1::2])] if level else []
        offers = sorted([(w, False) for w in weights] + [(w, True) for w in pairs])
        levels.append([is_pair for _, is_pair in offers])
        items = [weight for weight, _ in offers]
    lengths, bought = [0] * counts.numel(), max(0, 2 * len(weights) - 2)
    for offers_are_pairs in reversed(levels):
        num_pairs = sum(offers_are_pairs[:bought])
        for _, symbol in occurring[: bought - num_pairs]:
            lengths[symbol] += 1
        bought = 2 * num_pairs
    if len(weights) == 1:
        lengths[occurring[0][1]] = 1
    return torch.tensor(lengths, dtype=torch.int64, device=counts.device)


def codewords(lengths: Tensor) -> Tensor:
    """The canonical codeword of each symbol (int64), of which its lowest `length` bits count."""
    order = _canonical(lengths)
    spans = _spans(lengths[order])
    words = torch.zeros_like(lengths)
    words[order] = (torch.cumsum(spans, 0) - spans) >> (LIMIT - lengths[order])
    return words


def huffman_encode(symbols: Tensor, lengths: Tensor, num_bits: int) -> Tensor:
    symbols = symbols.to(torch.int64)
    _expect_code(lengths)
    if not 0 <= int(symbols.min()) <= int(symbols.max()) < lengths.numel():
        raise codeword_error(num_bits)
    bits = lengths[symbols]
    ends = torch.cumsum(bits, 0)
    if int(bits.min()) == 0 or int(ends[-1]) != num_bits:
        raise codeword_error(num_bits)
    starts = ends - bits
    chunks = pack_uints(starts[::CHUNK].diff(), _CHUNK_BITS)
    return torch.cat([chunks, _place(codewords(lengths)[symbols], bits, starts, num_bits)])


def huffman_decode(packed: Tensor, lengths: Tensor, count: int, walk: Walk | None = None) -> Tensor:
    _expect_code(lengths)
    order = _canonical(lengths)
    symbol_of = torch.repeat_interleave(order, _spans(lengths[order]))  # by the next 15 bits
    num_chunks = -(-count // CHUNK)
    head, stream = packed[: head_bytes(count)], packed[head_bytes(count) :]
    used = (num_chunks - 1) * _CHUNK_BITS % 8
    if used and int(head[-1]) >> used:
        raise padding_error()
    edges = torch.zeros(num_chunks, dtype=torch.int64, device=packed.device)
    edges[1:] = torch.cumsum(unpack_uints(head, _CHUNK_BITS, num_chunks - 1), 0)
    symbols, ends = (walk or _walk)(stream, edges, symbol_of, lengths, count)
    num_bits = int(ends[-1])
    if not torch.equal(ends[:-1], edges[1:]) or -(-num_bits // 8) != stream.numel():
        raise chunk_end_error()
    if num_bits % 8 and int(stream[-1]) & (0xFF >> num_bits % 8):
        raise padding_error()
    return symbols


def _expect_code(lengths: Tensor) -> None:
    present = lengths[lengths != 0]
    if bool(((present < 0) | (present > LIMIT)).any()) or int(_spans(present).sum()) != 1 << LIMIT:
        raise invalid_lengths_error()


def _canonical(lengths: Tensor) -> Tensor:
    """The symbols that occur, from the shortest codeword to the longest."""
    order = torch.argsort(lengths, stable=True)
    return order[lengths[order] > 0]


def _spans(lengths: Tensor) -> Tensor:
    """How many of all strings of 15 bits begin with a codeword of this length."""
    return torch.ones_like(lengths) << (LIMIT - lengths)


def _place(words: Tensor, bits: Tensor, starts: Tensor, num_bits: int) -> Tensor:
    """Codewords of so many bits at these places of a stream, highest bit first, as uint8."""
    stream = torch.zeros(num_bits // 8 + 3, dtype=torch.int32, device=words.device)
    aligned = (words << (24 - starts % 8 - bits)).to(torch.int32)  # in three bytes from its first
    first = starts >> 3
    for byte in range(3):
        stream.index_add_(0, first + byte, (aligned >> (16 - 8 * byte)) & 0xFF)
    return stream[: -(-num_bits // 8)].to(torch.uint8)


def _walk(
    stream: Tensor, edges: Tensor, symbol_of: Tensor, lengths: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """The symbols of all chunks, and where each chunk's last codeword ends."""
    padded = torch.nn.functional.pad(stream, (0, 3)).to(torch.int32)
    # What starts at each byte: 24 bits, enough for 15 from any of its bits on.
    windows = padded[:-2] << 16 | padded[1:-1] << 8 | padded[2:]
    beyond = 8 * stream.numel() + 1  # where a damaged stream runs to and stays
    length_of = lengths[symbol_of]
    places = edges.clamp(max=beyond)
    symbols = torch.zeros(CHUNK, edges.numel(), dtype=torch.int32, device=stream.device)
    remaining = count - CHUNK * (edges.numel() - 1)  # symbols of the last chunk
    for step in range(min(count, CHUNK)):
        if step == remaining:
            finished, places = places[-1:], places[:-1]
        ahead = windows[places >> 3] >> (9 - (places & 7)) & 0x7FFF
        symbols[step, : places.numel()] = symbol_of[ahead].to(torch.int32)
        places = (places + length_of[ahead]).clamp(max=beyond)
    if places.numel() < edges.numel():
        places = torch.cat([places, finished])
    return symbols.t().reshape(-1)[:count], places
