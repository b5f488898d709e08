"""What the coders of symbols share: one part of bytes, and the alphabet from the chain."""

from abc import abstractmethod

import torch
from torch import Tensor

from gradwire.core.codec import Codec, Kind, Parts, State, Traits, expect
from gradwire.core.key import Key
from gradwire.core.spec import Spec


class Coder(Codec):
    """A lossless code of symbols, which ends a chain."""

    traits = Traits(takes=Kind.SYMBOLS)
    leaves = Kind.NOTHING
    parts = ("code",)

    @abstractmethod
    def encode_symbols(self, symbols: Tensor, alphabet: int) -> Tensor:
        """Integers 0 .. alphabet - 1 as uint8."""

    @abstractmethod
    def decode_symbols(self, code: Tensor, count: int, alphabet: int) -> Tensor:
        """The inverse as int32 [count]; `WireError` for bytes that are no code."""

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        raise ValueError(
            f"{self!r} encodes {Kind.SYMBOLS.value}, so it must follow a quantiser. "
            f"Write qsgd(bits=4) >> {self!r}."
        )

    def split_symbols(
        self, symbols: Tensor, alphabet: int, state: State, key: Key
    ) -> tuple[Parts, State]:
        """`split` of symbols; the chain knows the alphabet."""
        if symbols.dtype == torch.bool:
            symbols = symbols.view(torch.uint8)
        return {"code": self.encode_symbols(symbols, alphabet)}, state

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        assert spec.alphabet is not None, "a chain knows the alphabet of its coder"
        code = expect(parts["code"], "code", parts["code"].numel(), torch.uint8)
        return self.decode_symbols(code, spec.numel, spec.alphabet)
