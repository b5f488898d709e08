"""Decoding what this process has encoded for several workers at once.

The simulator holds the bytes of a payload, and what they were made of. A note on the buffer
(`kernels/_notes.py`) says which positions and values its bytes describe; it holds for this very
buffer as long as nobody changes it. So no checksum has to be computed again, no position to be
decoded, and the vectors of all workers are written at once, as rows. Bytes that came from
elsewhere have no such note, and are checked and decoded.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.core.codec import Codec, scale_dtype
from gradwire.core.metering import UNPACK, report, reported
from gradwire.core.payload import Payload
from gradwire.core.rows import split_rows
from gradwire.core.spec import Spec


class EntryRows:
    """Positions (int64, ascending) and values of what `codec` selected of each of n vectors."""

    def __init__(self, codec: Codec, spec: Spec, chosen: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.codec, self.spec = codec, spec
        self.positions = [positions for positions, _ in chosen]
        self.values = [values for _, values in chosen]
        self._whole: tuple[Tensor, ...] | None = None

    def describes(self, codec: Codec, spec: Spec) -> bool:
        """Whether payloads of them are of this codec and such a tensor."""
        own = self.spec
        return own.shape == spec.shape and own.dtype == spec.dtype and self.codec == codec

    def decoded(self, number: int) -> Tensor:
        """A row, zero but for what was selected; all are made at the first call."""
        if self._whole is None:
            counts = [len(positions) for positions in self.positions]
            values, device = torch.cat(self.values), self.values[0].device
            starts = torch.arange(len(counts)).mul_(self.spec.numel)
            if len(set(counts)) == 1:
                starts = starts.to(device).repeat_interleave(counts[0])
            else:
                starts = starts.repeat_interleave(torch.tensor(counts)).to(device)
            whole = values.new_zeros(len(counts), self.spec.numel)
            places = torch.cat(self.positions).add_(starts)
            self._whole = split_rows(whole.view(-1).scatter_(0, places, values).view_as(whole))
        return self._whole[number]


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """What a buffer describes: one of the vectors."""

    rows: EntryRows
    number: int
    nbytes: int  # of the parts

    @property
    def positions(self) -> Tensor:
        return self.rows.positions[self.number]

    @property
    def amounts(self) -> Tensor:
        return self.rows.values[self.number]


def note_entries(
    codec: Codec,
    spec: Spec,
    payloads: Sequence[Payload],
    chosen: Sequence[tuple[Tensor, Tensor]],
) -> None:
    """Notes what was selected of n vectors on the payloads of all of it. They lie on one device."""
    rows = EntryRows(codec, spec, chosen)
    for number, payload in enumerate(payloads):
        nbytes = sum(part.numel() * part.element_size() for part in payload.parts.values())
        found, buffer = Entries(rows, number, nbytes), payload.buffer
        kernels.note(buffer, host=kernels.noted(buffer, "host"), entries=found)


def entries_of(codec: Codec, spec: Spec, buffers: Sequence[Tensor]) -> list[Entries] | None:
    """What is noted of all of the buffers; None if one is not known to be of this codec."""
    found: list[Entries] = []
    rows = None
    for buffer in buffers:
        known: Entries | None = kernels.noted(buffer, "entries")
        if known is None or not (known.rows is rows or known.rows.describes(codec, spec)):
            return None
        rows = known.rows
        found.append(known)
    return found


def decode_noted(codec: Codec, spec: Spec, buffer: Tensor) -> Tensor | None:
    """What a buffer decodes to, as a row, which nobody may change; None if it is not known."""
    found = entries_of(codec, spec, [buffer])
    if found is None:
        return None
    report(UNPACK, buffer.numel())
    return _row(codec, buffer, found[0])


def mean_of_noted(codec: Codec, spec: Spec, buffers: Sequence[Tensor]) -> Tensor | None:
    """The mean of what buffers decode to, added in order; None if it is not known."""
    fusion = codec.fusion
    if len(buffers) == 1 or fusion is None or not fusion.adds_few or fusion.averages:
        return None
    found = entries_of(codec, spec, buffers)
    if found is None:
        return None
    for buffer in buffers:
        report(UNPACK, buffer.numel())
    total = kernels.empty(spec.numel, scale_dtype(spec.dtype), buffers[0].device).zero_()
    for one in found:
        _add(codec, total, one)
    return total.reshape(spec.shape).div_(len(buffers)).to(spec.dtype)


@reported("decode")
def _row(codec: Codec, buffer: Tensor, found: Entries) -> Tensor:
    return found.rows.decoded(found.number)


@reported("add_joined")
def _add(codec: Codec, total: Tensor, found: Entries) -> Tensor:
    return total.index_add_(0, found.positions, found.amounts)
