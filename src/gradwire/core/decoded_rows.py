"""Decoding what this process has encoded for several workers at once.

The simulator holds the bytes of a payload, and what they were made of. A note on the buffer
(`kernels/_notes.py`) says what its bytes describe; it holds for this very buffer as long as nobody
changes it. So no checksum has to be computed again, no position to be decoded, and the vectors of
all workers are written at once, as rows. Bytes that came from elsewhere have no such note, and are
checked and decoded. Results and reports are those of decoding one after another.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.core.codec import Codec, scale_dtype
from gradwire.core.group import mean_in_order
from gradwire.core.metering import UNPACK, report, reported
from gradwire.core.payload import Payload
from gradwire.core.rows import split_rows
from gradwire.core.spec import Spec

_MOST_AT_ONCE = 1 << 28  # elements of all vectors that are decoded at once: 1 GiB


class KnownRows(ABC):
    """What payloads of n vectors by `codec` describe. They lie on one device."""

    def __init__(self, codec: Codec, spec: Spec, count: int) -> None:
        self.codec, self.spec, self.count = codec, spec, count
        self._decoded: tuple[Tensor, ...] | None = None

    def describes(self, codec: Codec, spec: Spec) -> bool:
        """Whether payloads of them are of this codec and such a tensor."""
        own = self.spec
        return own.shape == spec.shape and own.dtype == spec.dtype and self.codec == codec

    @abstractmethod
    def decode(self) -> Tensor:
        """All vectors, [n, d]."""

    def decoded(self, number: int) -> Tensor:
        """One of them; all are made at the first call, and kept."""
        if self._decoded is None:
            self._decoded = split_rows(self.decode())
        return self._decoded[number]

    def note(self, payloads: Sequence[Payload]) -> None:
        """Notes on all of their bytes what these describe."""
        for number, payload in enumerate(payloads):
            kernels.note_more(payload.buffer, row=Row(self, number, payload.parts_nbytes))


class EntryRows(KnownRows):
    """Positions (int64, ascending) and values of what was selected of each vector."""

    def __init__(self, codec: Codec, spec: Spec, chosen: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().__init__(codec, spec, len(chosen))
        self.positions = [positions for positions, _ in chosen]
        self.values = [values for _, values in chosen]

    def decode(self) -> Tensor:
        counts = [len(positions) for positions in self.positions]
        values, device = torch.cat(self.values), self.values[0].device
        starts = torch.arange(len(counts)).mul_(self.spec.numel)
        if len(set(counts)) == 1:
            starts = starts.to(device).repeat_interleave(counts[0])
        else:
            starts = starts.repeat_interleave(torch.tensor(counts)).to(device)
        whole = values.new_zeros(len(counts), self.spec.numel)
        places = torch.cat(self.positions).add_(starts)
        return whole.view(-1).scatter_(0, places, values).view_as(whole)


class DenseRows(KnownRows):
    """Vectors that a function decodes."""

    def __init__(self, codec: Codec, spec: Spec, count: int, decode: Callable[[], Tensor]) -> None:
        super().__init__(codec, spec, count)
        self._decode = decode

    def decode(self) -> Tensor:
        return self._decode()


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """What a buffer describes: one of the vectors."""

    rows: KnownRows
    number: int
    nbytes: int  # of the parts


def known_rows(codec: Codec, spec: Spec, buffers: Sequence[Tensor]) -> list[Row] | None:
    """What is known of all of the buffers; None if one is not known to be of this codec."""
    found: list[Row] = []
    rows = None
    for buffer in buffers:
        known: Row | None = kernels.noted(buffer, "row")
        if known is None or not (known.rows is rows or known.rows.describes(codec, spec)):
            return None
        rows = known.rows
        found.append(known)
    return found


def decode_known(codec: Codec, spec: Spec, buffer: Tensor) -> Tensor | None:
    """What a buffer decodes to, as a row, which nobody may change; None if it is not known."""
    found = known_rows(codec, spec, [buffer])
    if found is None or found[0].rows.count * spec.numel > _MOST_AT_ONCE:
        return None
    report(UNPACK, buffer.numel())
    return _decoded(codec, buffer, found[0].rows.decoded(found[0].number))


def mean_of_known(codec: Codec, spec: Spec, buffers: Sequence[Tensor]) -> Tensor | None:
    """The mean of what buffers decode to, added in order; None if it is not known."""
    fusion, count = codec.fusion, len(buffers)
    if fusion is None or fusion.averages or count == 1:
        return None
    found = known_rows(codec, spec, buffers)
    if found is None:
        return None
    rows = found[0].rows
    if isinstance(rows, EntryRows):
        _report_unpacked(buffers)
        total = kernels.empty(spec.numel, scale_dtype(spec.dtype), buffers[0].device).zero_()
        for one in found:
            _add(codec, total, one)
        return total.reshape(spec.shape).div_(count).to(spec.dtype)
    if any(one.rows is not rows for one in found) or rows.count > 2 * count:
        return None
    if rows.count * spec.numel > _MOST_AT_ONCE:
        return None
    _report_unpacked(buffers)
    whole = rows.decode()  # and not kept
    pieces = (_decoded(codec, own, whole[row.number]) for own, row in zip(buffers, found))
    return mean_in_order(pieces, count)


def _report_unpacked(buffers: Sequence[Tensor]) -> None:
    for buffer in buffers:
        report(UNPACK, buffer.numel())


@reported("decode")
def _decoded(codec: Codec, buffer: Tensor, vector: Tensor) -> Tensor:
    return vector


@reported("add_joined")
def _add(codec: Codec, total: Tensor, row: Row) -> Tensor:
    entries = row.rows
    assert isinstance(entries, EntryRows), "a codec makes one kind"
    return total.index_add_(0, entries.positions[row.number], entries.values[row.number])
