"""Huffman coding (Huffman 1952, "A method for the construction of minimum-redundancy codes").

The best code with whole bits per symbol: at least one bit each, and less than one more than the
entropy. `rans` has no such floor; Huffman's merit is that decoders of it are everywhere. Lengths
are limited to 15 bits, which costs nothing unless a symbol is rarer than about one in 10,000. See
`coding/huffman.py` for the format.

Use it where a decoder must be simple, or for messages of a few thousand symbols, which can come out
shorter than with `rans`. Otherwise take `rans`, above all where one symbol is so frequent that a
whole bit is too much for it.
"""

from dataclasses import dataclass

from torch import Tensor

from gradwire.coding.huffman import decode_huffman, encode_huffman
from gradwire.core.coder import Coder


@dataclass(frozen=True, repr=False)
class Huffman(Coder):
    """Code frequent symbols in few bits and rare ones in many."""

    paper = "Huffman 1952, A method for the construction of minimum-redundancy codes"
    examples = ("qsgd(bits=4) >> huffman", "qsgd(bits=16) >> huffman", "sign >> huffman")

    def encode_symbols(self, symbols: Tensor, alphabet: int) -> Tensor:
        return encode_huffman(symbols, alphabet)

    def decode_symbols(self, code: Tensor, count: int, alphabet: int) -> Tensor:
        return decode_huffman(code, count, alphabet)
