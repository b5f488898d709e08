"""Trellis-coded quantisation: quantisers, contexts, and the code of indices.

All of it is integer arithmetic. Numbers come scaled: 64 is one step. An index k stands for an even
multiple of the step in quantiser 0 and for an odd one, or zero, in quantiser 1:

    value = sgn(k) (64 (2|k| - q) - offset),   0 for k = 0

Which quantiser q is used follows from the parities of the indices before, through the eight states
of Ungerboeck's code (1 + D + D^3, D^2): q is the lowest bit of a state, and with parity z

    (s0, s1, s2) -> (s0 + s1, s2 + z, s0)   modulo 2, from state 0 at the start of a segment.

If signs count (`signed`), a negative index of quantiser 1 has the other parity. Then -1 and 1 are
distinguished by the trellis, as in Fischer and Wang's code. Without zero in quantiser 1 (a matter
of rates) that is best for numbers like a Gaussian's; the other way for those that are mostly zero.

Contexts. The indices before it in its segment predict how large the next one is. Averages
forget exponentially: of the row so far, of the same columns in the rows before, of the last few
elements. Expected is row / (mean of the columns along the row) * column, as for an outer product;
its logarithm, mixed with that of the last few, rounded, is the class. A context is 2 class + q.

The search for the best indices is in `trellis_search.py`.

The code is rANS as in reference/rans.py, one state per segment. A symbol is 0, +1, -1, more or
-more at 15 bits; `more` is followed by the tail |k| - 2 as a token of 12 bits: 0 .. 15, or
the number of bits of what is larger, followed by those bits.
"""

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

UNIT = 64
BLOCK = 1024
CLASSES = 16
STEEPEST = 16
TOKENS, DIRECT = 28, 16
PRECISION, TAIL_PRECISION = 15, 12
LARGEST = 65535 + 2  # of an index
_MIN_STATE = 1 << 16
_INITIAL_MEAN, _MIN_MEAN, _FRACTION_BITS, _MAX_SIZE = 1024, 16, 12, 1023
_ROW_SHIFT, _VECTOR_SHIFT = 6, 7


def invalid_code_error() -> ValueError:
    return ValueError("trellis_decode: the bytes are no code of so many elements")


def segment_starts(count: int, segments: int) -> list[int]:
    """Where segments begin, and the end of the last. They are of whole blocks but for the last."""
    blocks = count // BLOCK
    return [*(blocks * s // segments * BLOCK for s in range(segments)), count]


class ContextModel:
    """Predicts the size of the next element from those before it in its segment."""

    def __init__(self, shapes: Sequence[tuple[int, int]], first: int) -> None:
        self._shapes = shapes
        self._tensor = 0
        while first >= shapes[self._tensor][0] * shapes[self._tensor][1]:
            first -= shapes[self._tensor][0] * shapes[self._tensor][1]
            self._tensor += 1
        self._mean = _INITIAL_MEAN
        self.state = 0
        self._start_tensor()
        self._rows_left -= first // self._width
        self._at = first % self._width

    def _start_tensor(self) -> None:
        self._rows_left, self._width = self._shapes[self._tensor]
        self._is_vector = self._rows_left == 1
        self._columns_of = [self._mean] * (1 if self._is_vector else self._width)
        self._rows_done = self._at = 0
        self._start_row()

    def _start_row(self) -> None:
        self._row = self._columns = 3 * self._mean
        self._left = self._mean
        done = self._rows_done
        self._shift = 2 if done < 4 else 3 if done < 12 else 4 if done < 28 else 5
        if self._is_vector:
            self._shift = _VECTOR_SHIFT

    def _end_row(self) -> None:
        self._mean += ((self._row >> _ROW_SHIFT) - self._mean) >> _ROW_SHIFT
        self._mean = max(self._mean, _MIN_MEAN)
        self._at = 0
        self._rows_done += 1
        self._rows_left -= 1
        if self._rows_left:
            self._start_row()
        elif self._tensor + 1 < len(self._shapes):
            self._tensor += 1
            self._start_tensor()

    def context(self) -> int:
        column = self._columns_of[0 if self._is_vector else self._at]
        level = _logarithm(self._row) - _logarithm(self._columns) + _logarithm(column)
        mixed = (7 * level + _logarithm(self._left)) >> 3
        number = ((mixed - 64 * _FRACTION_BITS + 32) >> 6) + CLASSES // 2
        return min(max(number, 0), CLASSES - 1) << 1 | self.state & 1

    def learn(self, index: int, signed: bool) -> None:
        self.state = _next_state(self.state, index, signed)
        self._learn_size(min(abs(index), _MAX_SIZE) << _FRACTION_BITS)

    def learn_value(self, index: int, q: int) -> None:
        """Updates with a value in units of two steps, where a plane selects the quantisers."""
        half = q << (_FRACTION_BITS - 1) if index else 0
        self._learn_size((min(abs(index), _MAX_SIZE) << _FRACTION_BITS) - half)

    def _learn_size(self, v: int) -> None:
        at = 0 if self._is_vector else self._at
        c = self._columns_of[at]
        self._left = (self._left + v) >> 1
        self._row += v - (self._row >> _ROW_SHIFT)
        self._columns += c - (self._columns >> _ROW_SHIFT)
        self._columns_of[at] = c + ((v - c) >> self._shift)
        self._at += 1
        if self._at == self._width:
            self._end_row()


def _next_state(s: int, index: int, signed: bool) -> int:
    k = abs(index) ^ (s & 1 if signed and index < 0 else 0)
    return (s ^ s >> 1) & 1 | ((s >> 2 ^ k) & 1) << 1 | (s & 1) << 2


def _logarithm(average: int) -> int:
    """To base 2, with 6 bits after the point."""
    u = average + _MIN_MEAN
    exponent = u.bit_length() - 1
    return exponent << 6 | (u << 31 >> exponent >> 25) & 63


def trellis_contexts(
    scaled: Tensor, indices: Tensor | None, shapes: Tensor, segments: int, signed: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    tensors = [(int(rows), int(width)) for rows, width in shapes.tolist()]
    magnitudes = scaled.abs().tolist()
    known = None if indices is None else indices.tolist()
    numbers = scaled.tolist()
    contexts = []
    counts = [[0] * 4 for _ in range(2 * CLASSES)]
    errors = [[0] * 2 for _ in range(6)]
    starts = segment_starts(len(magnitudes), segments)
    for first, last in itertools.pairwise(starts):
        model = ContextModel(tensors, first)
        for i in range(first, last):
            context, u = model.context(), magnitudes[i]
            contexts.append(context & ~1 if known is None else context)
            if known is None:
                # No indices yet: rounded, with a wider zero, by each of the quantisers.
                k = (u + 50) >> 7
                _tally(counts[context & ~1], k)
                _tally(counts[context | 1], (u + 78) >> 7)
            else:
                k, q = known[i], context & 1
                _tally(counts[context], abs(k))
                _tally_error(errors, k, q, numbers[i])
            model.learn(k, signed)
    return (
        torch.tensor(contexts, dtype=torch.uint8, device="cpu"),
        torch.tensor(counts, dtype=torch.int64, device="cpu"),
        torch.tensor(errors, dtype=torch.int64, device="cpu"),
    )


def trellis_counts(
    scaled: Tensor, indices: Tensor, contexts: Tensor, signed: bool = False
) -> tuple[Tensor, Tensor]:
    counts = [[0] * 4 for _ in range(2 * CLASSES)]
    errors = [[0] * 2 for _ in range(6)]
    state = 0
    for x, k, context in zip(scaled.tolist(), indices.tolist(), contexts.tolist()):
        q = state & 1
        _tally(counts[context & ~1 | q], abs(k))
        _tally_error(errors, k, q, x)
        state = _next_state(state, k, signed)
    return torch.tensor(counts, dtype=torch.int64, device="cpu"), torch.tensor(
        errors, dtype=torch.int64, device="cpu"
    )


def _tally_error(errors: list[list[int]], k: int, q: int, x: int) -> None:
    if k:
        error = errors[3 * q + min(abs(k), 3) - 1]
        error[0] += 1
        error[1] += 2 * UNIT * abs(k) - UNIT * q - (x if k > 0 else -x)


def _tally(counts: list[int], k: int) -> None:
    counts[min(k, 2)] += 1
    counts[3] += k - min(k, 2)


def trellis_encode(
    indices: Tensor, contexts: Tensor, halves: Tensor, tails: Tensor, segments: int
) -> tuple[Tensor, Tensor]:
    tables = [_symbol_table(*pair) for pair in halves.tolist()]
    tail_tables = [_starts(row) for row in tails.tolist()]
    ks, cs = indices.tolist(), contexts.tolist()
    code: list[int] = []
    lengths = []
    starts = segment_starts(len(ks), segments)
    for first, last in itertools.pairwise(starts):
        x, words = _MIN_STATE, []
        for i in reversed(range(first, last)):
            k, c = ks[i], cs[i]
            u = abs(k)
            steps: list[tuple[int, int, int]] = []  # frequency, start, precision; last one first
            if u >= 2:
                tail = token = u - 2
                if tail >= DIRECT:
                    bits = tail.bit_length() - 1
                    token = DIRECT + bits - 4
                    steps.append((1, tail - (1 << bits), bits))
                steps.append((*tail_tables[c][token], TAIL_PRECISION))
            symbol = 0 if u == 0 else (1 if u == 1 else 3) + (k < 0)
            steps.append((*tables[c][symbol], PRECISION))
            for f, start, precision in steps:
                if x >> (32 - precision) >= f:
                    words.append(x & 0xFFFF)
                    x >>= 16
                x = (x // f << precision) + start + x % f
        words += [x >> 16, x & 0xFFFF]
        code += reversed(words)
        lengths.append(len(words))
    shifts = torch.tensor([0, 8], device="cpu")
    words_out = torch.tensor(code, dtype=torch.int64, device="cpu")[:, None] >> shifts & 0xFF
    return words_out.to(torch.uint8).reshape(-1), torch.tensor(
        lengths, dtype=torch.int64, device="cpu"
    )


def trellis_decode(
    packed: Tensor,
    lengths: Tensor,
    halves: Tensor,
    tails: Tensor,
    offsets: Tensor,
    shapes: Tensor,
    count: int,
    signed: bool = False,
    plane: Tensor | None = None,
) -> Tensor:
    tables = [_symbol_table(*pair) for pair in halves.tolist()]
    tail_tables = [_starts(row) for row in tails.tolist()]
    tensors = [(int(rows), int(width)) for rows, width in shapes.tolist()]
    offset = offsets.tolist()
    states = None if plane is None else plane.tolist()
    pairs = packed.view(-1, 2).tolist()
    words = [low | high << 8 for low, high in pairs]
    values: list[int] = []
    starts = segment_starts(count, lengths.numel())
    position = 0
    for first, last, length in zip(starts, starts[1:], lengths.tolist()):
        stream = iter(words[position : position + length])
        position += length
        x = next(stream) | next(stream) << 16
        model = ContextModel(tensors, first)
        for i in range(first, last):
            if states is not None:
                model.state = states[i >> 3] >> (i & 7) & 1
            c = model.context()
            symbol, x = _pop(x, tables[c], PRECISION, stream)
            k = (symbol + 1) >> 1
            if k == 2:
                token, x = _pop(x, tail_tables[c], TAIL_PRECISION, stream)
                if token >= DIRECT:
                    bits = token - DIRECT + 4
                    token = 1 << bits | x & ((1 << bits) - 1)
                    x = _refilled(x >> bits, stream)
                k += token
            q = c & 1
            value = 2 * UNIT * k - UNIT * q - offset[3 * q + min(k, 3) - 1] if k else 0
            values.append(value if symbol & 1 else -value)
            if states is None:
                model.learn(k if symbol & 1 else -k, signed)
            else:
                model.learn_value(k, q)
        if x != _MIN_STATE or next(stream, None) is not None:
            raise invalid_code_error()
    return torch.tensor(values, dtype=torch.int32, device="cpu")


def _symbol_table(one: int, more: int) -> list[tuple[int, int]]:
    return _starts([(1 << PRECISION) - 2 * (one + more), one, one, more, more])


def _starts(frequencies: Sequence[int]) -> list[tuple[int, int]]:
    """(frequency, sum of those before)."""
    table, start = [], 0
    for frequency in frequencies:
        table.append((frequency, start))
        start += frequency
    return table


def _pop(
    x: int, table: Sequence[tuple[int, int]], precision: int, stream: Iterator[int]
) -> tuple[int, int]:
    slot = x & ((1 << precision) - 1)
    symbol = next(s for s in reversed(range(len(table))) if slot >= table[s][1])
    f, start = table[symbol]
    return symbol, _refilled(f * (x >> precision) + slot - start, stream)


def _refilled(x: int, stream: Iterator[int]) -> int:
    if x >= _MIN_STATE:
        return x
    word = next(stream, None)
    if word is None:
        raise invalid_code_error()
    return x << 16 | word
