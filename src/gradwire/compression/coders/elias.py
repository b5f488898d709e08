"""Elias' codes of levels (Elias 1975), as QSGD sends them (Alistarh et al. 2017, sec. 3.1).

QSGD's levels are small integers, most of them zero, so a code that spends 2 floor(log2 v) + 1 bits
on v (gamma), or asymptotically log2 v (delta), needs no table of frequencies. Alistarh et al. code
runs of zeros and the levels between them with a recursive Elias code; we code every level's
distance from the message's most frequent symbol, zeros in one bit each, and leave runs to `golomb`.

Use it to send `qsgd` levels as its authors do, with no table of frequencies on the wire. Both
`huffman` and `rans` came out shorter on all vectors of the table; take one of them otherwise.
"""

from dataclasses import dataclass

from torch import Tensor

from gradwire.coding.elias import Code, decode_elias, encode_elias
from gradwire.core.coder import Coder


@dataclass(frozen=True, repr=False)
class Elias(Coder):
    """Code distances from the most frequent symbol, the shorter the nearer."""

    code: Code = "gamma"

    paper = "Elias 1975, Universal codeword sets and representations of the integers"
    examples = ("qsgd(bits=4) >> elias", 'qsgd(5) >> elias("delta")', "sign >> elias")

    def __post_init__(self) -> None:
        if self.code not in ("gamma", "delta"):
            raise ValueError(f'elias: code is "gamma" or "delta", got {self.code!r}')

    def encode_symbols(self, symbols: Tensor, alphabet: int) -> Tensor:
        return encode_elias(symbols, alphabet, self.code)

    def decode_symbols(self, code: Tensor, count: int, alphabet: int) -> Tensor:
        return decode_elias(code, count, alphabet, self.code)
