"""Payloads: named tensors in one packed buffer, which is exactly what the transport sends.

    byte 0   magic 0x57        4..7  CRC-32 of everything else, continued from `context`
    byte 1   version           8..   per part: dtype code, then its length as a varint
    byte 2   number of parts         zero padding to the alignment of the widest part
    byte 3   zero                    the parts, widest dtype first, each aligned

The parts are views into the buffer, so `nbytes` is the length of the packed buffer by
construction. Names do not travel: sender and receiver hold the same codec, which knows the names
and their order. `context` is a hash of codec and tensor; it costs nothing on the wire and makes
bytes of another codec or tensor fail the checksum. A checksum is no protection against malice,
so every reader still checks every length and every index.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.core.errors import WireError
from gradwire.core.metering import PACK, UNPACK, report
from gradwire.core.payload_header import DTYPES as DTYPES
from gradwire.core.payload_header import (
    FIXED,
    Frame,
    PartKind,
    checked_there,
    crc_after,
    crc_of_header,
    longest_header,
    packed_nbytes,
    read_header,
    read_there,
    seal_there,
)
from gradwire.core.payload_header import frame as frame
from gradwire.core.payload_header import seal as seal


class Payload:
    """An immutable message: `parts["values"]` are views into `buffer`, a uint8 vector.

    A deferred payload is packed when its bytes are asked for; until then its parts are what it was
    made of, which nobody may change. Whether what an accelerator encodes is finite may be known
    only later: `check_later` says how to find out, and parts and bytes are given out after that.
    """

    __slots__ = ("_buffer", "_check", "_frame", "_header", "_kinds", "_made", "context", "is_own")

    def __init__(
        self,
        buffer: Tensor | None,
        parts: Mapping[str, Tensor] | None,
        context: int,
        *,
        header: bytes | bytearray | None = None,
        is_own: bool = False,
    ) -> None:
        self._buffer = buffer
        self._header = header  # with zeros for the checksum; None once it is in the buffer
        # None until somebody asks: on an accelerator a view takes a third of a kernel's launch.
        self._made = None if parts is None else MappingProxyType(dict(parts))
        self._frame: Frame | None = None  # where the parts lie, of a payload that is `framed`
        self._kinds: Mapping[str, PartKind] = {}
        self._check: Callable[[], None] | None = None
        self.context = context
        self.is_own = is_own  # made by our own kernels on an accelerator: nothing to mistrust

    @property
    def parts(self) -> Mapping[str, Tensor]:
        self._run_check()
        return self._parts

    @property
    def _parts(self) -> Mapping[str, Tensor]:
        """As `parts`, before the check."""
        if self._made is None:
            assert self._buffer is not None
            assert self._frame is not None
            views = _views(self._buffer, self._frame.offsets, self._kinds.values())
            self._made = MappingProxyType(dict(zip(self._kinds, views)))
        return self._made

    def unchecked(self, name: str) -> Tensor:
        """A part, for the check itself."""
        return self._parts[name]

    def own_bytes(self, frame: Frame) -> Tensor | None:
        """Memory that our own kernels have written with the parts of this frame, where it says.

        Such parts need no check. The header may be missing yet: `buffer` has that, too.
        """
        if not self.is_own or self._frame is not frame:
            return None
        self._run_check()
        return self._buffer

    @property
    def buffer(self) -> Tensor:
        """The bytes that are sent. The checksum is computed at the first call: it takes longer than
        the rest of some codecs, and is not needed where values are added on their way."""
        self._run_check()
        if self._buffer is None:
            packed = Payload.pack(self._parts, self.context)
            self._buffer, self._header, self._made = packed._buffer, packed._header, packed._made
            self._frame, self._kinds = packed._frame, packed._kinds
        assert self._buffer is not None
        if self._header is not None:
            report(PACK, self.nbytes)
            header, self._header = self._header, None
            if checked_there(self._buffer):
                seal_there(self._buffer, header, self.context)
                return self._buffer
            host = self._buffer.cpu()  # of an accelerator a copy, which `unpack` reads as well
            seal(host, header, self.context)
            if host is not self._buffer:
                self._buffer[: len(header)] = host[: len(header)]
                self.sealed(host)
        return self._buffer

    def sealed(self, host: Tensor) -> None:
        """The bytes are complete, on an accelerator, and `host` has them as well."""
        assert self._buffer is not None
        self._header = None
        kernels.note(self._buffer, host=host)

    @property
    def nbytes(self) -> int:
        if self._buffer is None:
            return packed_nbytes(list(self._parts.values()))
        return self._buffer.numel()

    @property
    def parts_nbytes(self) -> int:
        """Bytes of the parts, without what frames them."""
        return sum(part.numel() * part.element_size() for part in self.parts.values())

    def __repr__(self) -> str:
        parts = ", ".join(
            f"{name}: {part.numel()} x {part.dtype}" for name, part in self._parts.items()
        )
        return f"Payload({self.nbytes} bytes: {parts})"

    def check_later(self, check: Callable[[], None]) -> None:
        """Runs `check`, which may raise, before parts or bytes are given out; on the CPU now."""
        assert self._check is None, "a payload has one check"
        self._check = check
        known = self._buffer if self._made is None else next(iter(self._made.values()))
        assert known is not None
        if known.device.type == "cpu":
            self._run_check()

    def _run_check(self) -> None:
        if self._check is not None:
            self._check()  # again at the next call if it raises
            self._check = None

    @staticmethod
    def deferred(parts: Mapping[str, Tensor], context: int = 0) -> "Payload":
        """For payloads whose parts may never travel as bytes: values that are averaged instead."""
        flat = {name: part.detach().reshape(-1) for name, part in parts.items()}
        return Payload(None, flat, context)

    @staticmethod
    def blank(
        kinds: Mapping[str, tuple[torch.dtype, int]], context: int, device: torch.device
    ) -> "Payload":
        """With parts of dtypes and lengths that the caller writes before anybody else sees it."""
        found = frame(kinds)
        buffer = kernels.empty(found.nbytes, torch.uint8, device)
        return Payload.framed(buffer, kinds, found, context)

    @staticmethod
    def framed(
        buffer: Tensor, kinds: Mapping[str, PartKind], frame: Frame, context: int
    ) -> "Payload":
        """As `blank`, in memory of the caller; `frame` is that of `kinds`, which stay as they are.

        The caller may have started the kernels that write it already.
        """
        is_own = buffer.device.type != "cpu"
        payload = Payload(buffer, None, context, header=frame.header, is_own=is_own)
        payload._frame, payload._kinds = frame, kinds
        return payload

    @staticmethod
    def pack(parts: Mapping[str, Tensor], context: int = 0) -> "Payload":
        """Copies the parts into one buffer, in the order given."""
        tensors = [part.detach().reshape(-1) for part in parts.values()]
        device = tensors[0].device if tensors else torch.device("cpu")
        kinds = {name: (part.dtype, part.numel()) for name, part in zip(parts, tensors)}
        payload = Payload.blank(kinds, context, device)
        payload.is_own = False
        for view, tensor in zip(payload._parts.values(), tensors):
            view.copy_(tensor)
        return payload

    @staticmethod
    def unpack(buffer: Tensor, names: Sequence[str], context: int = 0) -> "Payload":
        """The payload in a received buffer, without a copy; `WireError` if it is not one."""
        if not isinstance(buffer, Tensor):
            raise ValueError(
                f"unpack takes received bytes as a uint8 tensor, got {type(buffer).__name__}. "
                "Write torch.frombuffer(bytearray(data), dtype=torch.uint8)."
            )
        if buffer.dtype != torch.uint8 or buffer.dim() != 1:
            raise WireError(f"expected a vector of uint8, got {buffer.dtype} {list(buffer.shape)}")
        if buffer.numel() < FIXED:
            raise WireError(f"{buffer.numel()} bytes are too short: a header has {FIXED}")
        if not buffer.is_contiguous() or buffer.data_ptr() % 8:
            # A slice of a larger buffer, or foreign memory: the views need alignment.
            buffer = buffer.clone(memory_format=torch.contiguous_format)
        host = kernels.noted(buffer, "host")
        if host is None and checked_there(buffer):
            host, crc = read_there(buffer, len(names), context)
        else:
            if host is None:
                host = buffer.cpu()  # of an accelerator one copy, for header and checksum
            crc = None
        start = host[: longest_header(len(names))].numpy().tobytes()
        kinds, offsets, declared = read_header(start, buffer.numel(), names)
        report(UNPACK, buffer.numel())
        if crc is None:
            crc = crc_after(host, FIXED, crc_of_header(start[:FIXED], context))
        if crc != declared:
            raise WireError(
                f"checksum {declared:#010x}, expected {crc:#010x}: the bytes are damaged or "
                "belong to another codec or tensor"
            )
        parts = dict(zip(names, _views(buffer, offsets, kinds)))
        if host is not buffer:  # so that nobody has to wait for the device to read them
            for part, at, (dtype, count) in zip(parts.values(), offsets, kinds):
                if at + dtype.itemsize * count <= host.numel():
                    kernels.note(part, host=part_of(host, at, (dtype, count)))
        return Payload(buffer, parts, context)

    def replace(self, **parts: Tensor) -> "Payload":
        """A new payload with some parts exchanged."""
        unknown = set(parts) - set(self.parts)
        assert not unknown, f"no parts {unknown} in {self!r}"
        return Payload.pack({**self.parts, **parts}, self.context)


def _views(buffer: Tensor, offsets: Sequence[int], kinds: Iterable[PartKind]) -> list[Tensor]:
    return [part_of(buffer, offset, kind) for offset, kind in zip(offsets, kinds)]


def part_of(buffer: Tensor, offset: int, kind: PartKind) -> Tensor:
    """The part of a payload that begins at a byte of its buffer."""
    dtype, count = kind
    part = buffer[offset : offset + dtype.itemsize * count]
    return part if dtype == torch.uint8 else part.view(dtype)
