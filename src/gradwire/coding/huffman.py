"""Canonical Huffman codes of symbols (Huffman 1952), of at most 15 bits.

Lengths are optimal among codes so limited (package-merge, Larmore and Hirschberg 1990), and
decide the codewords: they count upwards from the shorter to the longer, symbols of equal length in
their own order. Of a message whose symbols are all equal only the table travels.

    the length of each symbol's codeword plus one, zero bits meaning that it does not occur, in
    Elias' gamma code; what is below the highest 12 bits of the symbols, if they have more, at
    fixed width; the bits of every full chunk of 2048 symbols but the last chunk, 15 bits each;
    the codewords, highest bit first

Knowing where chunks start a decoder takes one symbol of each at a time, so there are at most 2048
steps however long the message.
"""

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.coding._stream import Reader, join_low, read, split_low, table_size, take_low, write
from gradwire.coding.elias import decode_integers, encode_integers, expect_zero_padding
from gradwire.core.errors import WireError

_LIMIT = 15  # bits of the longest codeword
_CHUNK = 2048  # symbols; the bits of a chunk fit 15 bits
_CHUNK_BITS = (_LIMIT * _CHUNK).bit_length()


def encode_huffman(symbols: Tensor, alphabet: int) -> Tensor:
    """Symbols 0 .. alphabet - 1 as uint8, at most one byte more than at fixed width."""
    return write(symbols, alphabet, lambda symbols: _encode(symbols, alphabet))


def decode_huffman(packed: Tensor, count: int, alphabet: int) -> Tensor:
    """The inverse of `encode_huffman`, as int32 [count]; other bytes are a WireError."""
    return read(packed, count, alphabet, lambda reader: _decode(reader, count, alphabet))


def code_lengths(counts: list[int]) -> list[int]:
    """Bits of each symbol's codeword, at most 15; 0 for those that do not occur."""
    present = sorted((count, symbol) for symbol, count in enumerate(counts) if count)
    assert len(present) <= 1 << _LIMIT
    weights = [count for count, _ in present]
    # Package-merge: each level offers the symbols and pairs of the level before; 2n - 2 of the
    # lightest of the last level are bought, and a symbol's length is how often it was.
    levels: list[list[bool]] = []
    items = weights
    for level in range(_LIMIT):
        pairs = [a + b for a, b in zip(items[::2], items[1::2])] if level else []
        offers = sorted([(w, False) for w in weights] + [(w, True) for w in pairs])
        levels.append([is_pair for _, is_pair in offers])
        items = [weight for weight, _ in offers]
    lengths, bought = [0] * len(counts), 2 * len(present) - 2
    for offers_are_pairs in reversed(levels):
        num_pairs = sum(offers_are_pairs[:bought])
        for _, symbol in present[: bought - num_pairs]:
            lengths[symbol] += 1
        bought = 2 * num_pairs
    if len(present) == 1:
        lengths[present[0][1]] = 1
    return lengths


def codewords(lengths: Tensor) -> Tensor:
    """The canonical codeword of each symbol (int64), of which its lowest `length` bits count."""
    order = _canonical(lengths)
    spans = torch.ones_like(order) << (_LIMIT - lengths[order])
    words = torch.zeros_like(lengths)
    words[order] = (torch.cumsum(spans, 0) - spans) >> (_LIMIT - lengths[order])
    return words


def _canonical(lengths: Tensor) -> Tensor:
    """The symbols that occur, from the shortest codeword to the longest."""
    order = torch.argsort(lengths, stable=True)
    return order[lengths[order] > 0]


def _encode(symbols: Tensor, alphabet: int) -> Tensor:
    high, low = split_low(symbols, alphabet)
    counts = torch.bincount(high, minlength=table_size(alphabet))
    lengths = torch.tensor(code_lengths(counts.tolist()), device=symbols.device)
    parts = [encode_integers(lengths + 1, "gamma"), low]
    if int((lengths > 0).sum()) > 1:
        high = high.to(torch.int64)
        bits = lengths[high]
        ends = torch.cumsum(bits, 0)
        starts = ends - bits
        if symbols.numel() > _CHUNK:
            edges = starts[::_CHUNK]
            parts.append(kernels.pack_uints(edges.diff(), _CHUNK_BITS))
        parts.append(_place(codewords(lengths)[high], bits, starts, int(ends[-1])))
    return torch.cat(parts)


def _place(words: Tensor, bits: Tensor, starts: Tensor, num_bits: int) -> Tensor:
    """Codewords of so many bits at these places of a stream, highest bit first, as uint8."""
    stream = torch.zeros(num_bits // 8 + 3, dtype=torch.int32, device=words.device)
    aligned = (words << (24 - starts % 8 - bits)).to(torch.int32)  # in three bytes from its first
    first = starts >> 3
    for byte in range(3):
        stream.index_add_(0, first + byte, (aligned >> (16 - 8 * byte)) & 0xFF)
    return stream[: -(-num_bits // 8)].to(torch.uint8)


def _decode(reader: Reader, count: int, alphabet: int) -> Tensor:
    lengths = decode_integers(reader, table_size(alphabet), _LIMIT + 1, "gamma") - 1
    order = _canonical(lengths)
    low = take_low(reader, count, alphabet)
    if order.numel() == 1:
        if int(lengths.sum()) != 1:
            raise WireError(f"a Huffman code of one symbol in {int(lengths.sum())} bits, not 1")
        high = order.to(torch.int32).expand(count)
        return join_low(high, low, alphabet)
    spans = torch.ones_like(order) << (_LIMIT - lengths[order])
    if int(spans.sum()) != 1 << _LIMIT:
        raise WireError("codeword lengths that no Huffman code has")
    symbol_of = torch.repeat_interleave(order, spans)  # [2^15], by the next 15 bits
    num_chunks = -(-count // _CHUNK)
    edges = torch.zeros(num_chunks, dtype=torch.int64, device=lengths.device)
    if num_chunks > 1:
        packed = reader.take(-(-(num_chunks - 1) * _CHUNK_BITS // 8), "chunk lengths")
        expect_zero_padding(packed, (num_chunks - 1) * _CHUNK_BITS)
        edges[1:] = torch.cumsum(kernels.unpack_uints(packed, _CHUNK_BITS, num_chunks - 1), 0)
    stream = reader.take(reader.rest.numel(), "codewords")
    high, ends = _walk(stream, edges, symbol_of, lengths, count)
    num_bits = int(ends[-1])
    if not torch.equal(ends[:-1], edges[1:]) or -(-num_bits // 8) != stream.numel():
        raise WireError("Huffman codewords that do not end where they should")
    if num_bits % 8 and int(stream[-1]) & (0xFF >> num_bits % 8):
        raise WireError("ones behind the last Huffman codeword")
    return join_low(high, low, alphabet)


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
    symbols = torch.zeros(_CHUNK, edges.numel(), dtype=torch.int32, device=stream.device)
    remaining = count - _CHUNK * (edges.numel() - 1)  # symbols of the last chunk
    for step in range(min(count, _CHUNK)):
        if step == remaining:
            finished, places = places[-1:], places[:-1]
        ahead = windows[places >> 3] >> (9 - (places & 7)) & 0x7FFF
        symbols[step, : places.numel()] = symbol_of[ahead].to(torch.int32)
        places = (places + length_of[ahead]).clamp(max=beyond)
    if places.numel() < edges.numel():
        places = torch.cat([places, finished])
    return symbols.t().reshape(-1)[:count], places
