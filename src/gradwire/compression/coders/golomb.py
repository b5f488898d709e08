"""Golomb's code of a mostly-zero vector (Golomb 1966, "Run-length encodings").

The runs of the most frequent symbol between two others are coded as in `coding/indices.py`, or as
a bitmap where that is shorter, the others at fixed width. A zero that is one symbol among many
need not be the first: each message names its most frequent symbol.

Use it after `terngrad` or `qsgd(1)`, where one symbol makes up most of the vector and the others
come in clusters, as in the saved gradients; `stc` is coded so by default. For evenly spread or many
symbols take `rans`.
"""

from dataclasses import dataclass

from torch import Tensor

from gradwire.coding.golomb import decode_golomb, encode_golomb
from gradwire.core.coder import Coder


@dataclass(frozen=True, repr=False)
class Golomb(Coder):
    """Code the runs of the most frequent symbol; the others go at fixed width."""

    paper = "Golomb 1966, Run-length encodings"
    examples = ("qsgd(1) >> golomb", "qsgd(bits=4) >> golomb", "sign >> golomb")

    def encode_symbols(self, symbols: Tensor, alphabet: int) -> Tensor:
        return encode_golomb(symbols, alphabet)

    def decode_symbols(self, code: Tensor, count: int, alphabet: int) -> Tensor:
        return decode_golomb(code, count, alphabet)
