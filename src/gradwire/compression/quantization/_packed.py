"""Quantisers whose symbols are packed by the kernel that makes them.

Payloads hold them as they are packed; a coder that follows gets them unpacked, from `split`.
"""

from abc import abstractmethod
from functools import lru_cache

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.core.codec import (
    Codec,
    Kind,
    Parts,
    State,
    check_encoded,
    check_input,
    clamp_to,
    expect,
    payload_context,
)
from gradwire.core.errors import WireError
from gradwire.core.fusion import Fusion
from gradwire.core.key import Key
from gradwire.core.payload import Payload
from gradwire.core.rows import row_of
from gradwire.core.spec import Spec
from gradwire.core.symbols import (
    digits_per_byte,
    pack_symbols,
    packed_bytes,
    symbol_bits,
    unpack_symbols,
)


class PackedCodec(Codec):
    """An author writes `pack` and `decode_packed`, which are `split` and `join` of packed bytes."""

    leaves = Kind.SYMBOLS
    # Whether `pack` makes some payload also of what is not finite, and nobody waits in it: then an
    # accelerator need not be waited for before.
    packs_anything = False

    @abstractmethod
    def pack(self, x: Tensor, key: Key) -> Parts:
        """The parts of a flat vector, `values` packed."""

    @abstractmethod
    def decode_packed(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        """The flat vector. Trusts no part; of `values` the length has been checked."""

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        parts = self.pack(x, key)
        alphabet = self.alphabet(Spec.of(x), parts)
        return {**parts, "values": unpack_symbols(parts["values"], x.numel(), alphabet)}, state

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        values = pack_symbols(parts["values"], self.alphabet(spec, parts))
        return self.decode_packed({**parts, "values": values}, spec, key)

    @property
    def fusion(self) -> "_PackedFusion":
        return _PackedFusion(self)

    def alphabet(self, spec: Spec, parts: Parts) -> int:
        """How many symbols there are."""
        alphabet = self.values_spec(spec, parts).alphabet
        assert alphabet is not None
        return alphabet


class _PackedFusion(Fusion[PackedCodec]):
    """Symbols stay packed."""

    def encode(self, x: Tensor, state: State, key: Key) -> tuple[Payload, State]:
        codec = self.codec
        waits = not _checks_later(codec, x)
        if waits:
            check_input(codec, x)
        parts = codec.pack(x.detach().reshape(-1).contiguous(), key)
        wire = {name: parts[name] for name in codec.parts}
        payload = Payload.pack(wire, payload_context(codec, Spec.of(x)))
        if not waits:
            payload.is_own = True
            # float64: then no sum of finite numbers overflows.
            check_encoded(codec, x, payload, x.detach().sum(dtype=torch.float64))
        return payload, state

    def decode(self, payload: Payload, spec: Spec, key: Key, out: Tensor | None = None) -> Tensor:
        codec, flat, parts = self.codec, spec.flat(), payload.parts
        size = packed_bytes(flat.numel, codec.alphabet(flat, parts))
        expect(parts["values"], "values", size, torch.uint8)
        if payload.is_own and payload.context == payload_context(codec, spec):
            for part in parts.values():  # so that nobody waits to see whether they are good
                kernels.note_more(part, is_own=True)
        return codec.decode_packed(parts, flat, key).reshape(spec.shape)


def _checks_later(codec: PackedCodec, x: Tensor) -> bool:
    """Whether what x holds is looked at when the payload is asked for its parts."""
    if not codec.packs_anything or not isinstance(x, Tensor) or not kernels.checks_there(x.device):
        return False
    # Rows of several workers are read at once, see core/rows.py.
    return x.dtype in (torch.float32, torch.float16, torch.bfloat16) and row_of(x) is None


@lru_cache(maxsize=256)
def constants(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on a device, which nobody may change: to copy them takes as long as a kernel."""
    return torch.tensor(numbers, dtype=dtype, device=device)


def packing(alphabet: int) -> kernels.Packing:
    """How kernels pack symbols: as `pack_symbols` does."""
    return alphabet, symbol_bits(alphabet), digits_per_byte(alphabet)


def finished(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as `dtype`, without a copy if it has it already; x must be finite."""
    return x if x.dtype == dtype else clamp_to(x, dtype)


def look_up(
    packed: Tensor,
    table: Tensor,
    scale: Tensor | None,
    bucket: int,
    count: int,
    start: Tensor | None = None,
) -> Tensor:
    """table[symbol] * scale + start, [count]; `WireError` if a symbol has no finite entry."""
    how = packing(len(table))
    checked = not kernels.noted(packed, "is_own")
    found, ok = kernels.from_table(packed, how, table, scale, start, bucket, count, checked)
    if not ok:
        unpack_symbols(packed, count, len(table))  # which says so if there is no such symbol
        raise WireError("values: a symbol stands for no finite number")
    return found
