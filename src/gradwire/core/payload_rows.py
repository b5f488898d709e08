"""Payloads of several workers in one memory: written by one launch, and sealed by one copy.

The simulator encodes for all workers at once where it can (`core/coded_rows.py`). On an accelerator
every payload by itself would be waited for to compute its checksum, and again to check it.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.core.codec import Codec, check_encoded
from gradwire.core.payload import Payload, frame, part_of, seal
from gradwire.core.payload_header import PartKind, checked_there
from gradwire.core.rows import split_rows


class PiecePayload(Payload):
    """A payload in a piece of a memory, with its bytes complete. Its parts become views of the
    buffer when they are asked for, which for most never happens."""

    __slots__ = ("_nbytes_of_parts", "_places")

    def __init__(
        self,
        buffer: Tensor,
        host: Tensor,
        places: Mapping[str, tuple[int, PartKind]],
        context: int,
        parts_nbytes: int,
    ) -> None:
        """`places` says where each part begins; `host` has the same bytes on the CPU."""
        super().__init__(buffer, None, context, is_own=buffer.device.type != "cpu")
        self._places = places
        self._nbytes_of_parts = parts_nbytes
        if host is not buffer:
            self.sealed(host)

    @property
    def has_views(self) -> bool:
        """Whether anybody has asked for the parts."""
        return self._made is not None

    @property
    def _parts(self) -> Mapping[str, Tensor]:
        if self._made is None:
            buffer = self.buffer
            views = {name: part_of(buffer, *place) for name, place in self._places.items()}
            host = kernels.noted(buffer, "host")
            if host is not None:
                for name, place in self._places.items():
                    kernels.note(views[name], host=part_of(host, *place))
            self._made = MappingProxyType(views)
        return self._made

    @property
    def parts_nbytes(self) -> int:
        return self._nbytes_of_parts


class PayloadRows:
    """Payloads with parts of the same dtypes and lengths, which the caller writes.

    `parts` has each part of all payloads, [count, length]; rows lie further apart than that.
    """

    def __init__(
        self,
        kinds: Mapping[str, tuple[torch.dtype, int]],
        context: int,
        device: torch.device,
        count: int,
    ) -> None:
        self._header, offsets, nbytes = frame(kinds)
        stride = nbytes + -nbytes % 8  # every row is aligned
        self._whole = kernels.empty(count * stride, torch.uint8, device).view(count, stride)
        self.parts = {
            name: self._whole[:, at : at + dtype.itemsize * length].view(dtype)
            for (name, (dtype, length)), at in zip(kinds.items(), offsets)
        }
        self._buffers = [row[:nbytes] for row in self._whole]
        rows = zip(*self.parts.values())
        self.payloads = [
            Payload(
                buffer,
                dict(zip(kinds, parts)),
                context,
                header=bytearray(self._header),
                is_own=device.type != "cpu",
            )
            for buffer, parts in zip(self._buffers, rows)
        ]

    def write(self, **parts: Tensor) -> None:
        for name, part in parts.items():
            self.parts[name].copy_(part)

    def checked(self, codec: Codec, x: Tensor, shows: Tensor) -> list[Payload]:
        """The payloads of the rows of x, with their bytes complete, if all are finite: `shows` are
        rows that are not finite where x, or its residual, is not."""
        for payload, given, shown in zip(self.payloads, x, split_rows(shows)):
            check_encoded(codec, given, payload, shown)
        self._seal()
        return self.payloads

    def _seal(self) -> None:
        if self._whole.device.type == "cpu" or all(map(checked_there, self._buffers)):
            for payload in self.payloads:
                _ = payload.buffer
            return
        for payload in self.payloads:
            _ = payload.parts  # runs its check
        host = self._whole.cpu()
        rows = [row[: len(buffer)] for row, buffer in zip(host, self._buffers)]
        for payload, row in zip(self.payloads, rows):
            seal(row, bytearray(self._header), payload.context)
        width = len(self._header)
        self._whole[:, :width] = host[:, :width].to(self._whole.device)
        for payload, row in zip(self.payloads, rows):
            payload.sealed(row)


def moved(payloads: Sequence[Payload], device: torch.device) -> list[Payload]:
    """Payloads of the CPU on an accelerator, by one copy."""
    starts, total = [], 0
    for payload in payloads:
        starts.append(total)
        total += payload.nbytes + -payload.nbytes % 8
    # Zeros without torch, whose threads would take longer to wake than they work.
    packed = torch.frombuffer(bytearray(total), dtype=torch.uint8)
    for start, payload in zip(starts, payloads):
        packed[start : start + payload.nbytes] = payload.buffer
    there = kernels.from_host(packed, device)
    return [_beside(p, there[at : at + p.nbytes]) for at, p in zip(starts, payloads)]


def _beside(payload: Payload, buffer: Tensor) -> Payload:
    """A payload in a copy of its bytes."""
    host = payload.buffer
    parts = {}
    for name, part in payload.parts.items():
        at = part.storage_offset() * part.element_size() - host.storage_offset()
        view = buffer[at : at + part.numel() * part.element_size()].view(part.dtype)
        parts[name] = kernels.note(view, host=part)
    own = Payload(buffer, parts, payload.context, is_own=True)
    own.sealed(host)
    return own
