"""rANS (Duda 2013, "Asymmetric numeral systems: entropy coding combining speed of Huffman coding
with compression rate of arithmetic coding").

Comes within a per cent of the symbols' order-0 entropy, also where that is well below one bit,
which no code with whole bits per symbol does. The message's own frequencies travel in front (some
20 bytes for `qsgd(bits=4)`). See `coding/rans.py` for the format.

Use it as the default coder, after anything that leaves symbols of unequal frequency: `qsgd(bits=4)
>> rans`, likewise `adaptive`, `natural`, `lowprec` and `fp8`. It gains nothing after `sign`, whose
two symbols are equally frequent; where nearly all is zero see `golomb`.
"""

from dataclasses import dataclass

from torch import Tensor

from gradwire.coding.rans import decode_rans, encode_rans
from gradwire.core.coder import Coder


@dataclass(frozen=True, repr=False)
class RANS(Coder):
    """Code symbols in about their information content, fractions of a bit included."""

    paper = (
        "Duda 2013, Asymmetric numeral systems: entropy coding combining speed of Huffman coding "
        "with compression rate of arithmetic coding"
    )
    examples = (
        "qsgd(bits=4) >> rans",
        "qsgd(bits=16) >> rans",
        "sign >> rans",
        "topk(0.3) >> qsgd(bits=4) >> rans",
    )

    def encode_symbols(self, symbols: Tensor, alphabet: int) -> Tensor:
        return encode_rans(symbols, alphabet)

    def decode_symbols(self, code: Tensor, count: int, alphabet: int) -> Tensor:
        return decode_rans(code, count, alphabet)
