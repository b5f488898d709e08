"""Entries on an accelerator: written into the payload as they are coded, and out of it as they are
decoded, where their positions take Rice's code. Else codecs compose other operations.

Both save launches, copies and waits, which there take longer than the arithmetic.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.coding.indices import rice_code, scatter_indices
from gradwire.compression.sparsification._selection import count_bytes
from gradwire.core.codec import Codec, Parts, payload_context
from gradwire.core.payload import Payload, frame
from gradwire.core.payload_header import code_of, lead_of
from gradwire.core.payload_rows import PiecePayload
from gradwire.core.spec import Spec

_MOST_LEAD = 8  # bytes in front of Rice's code, the mode among them


def entries_payload(
    codec: Codec, indices: Tensor, values: Tensor, spec: Spec, counted: bool
) -> Payload | None:
    """The payload of entries, with their number in front of the positions if they are `counted`;
    None where it has to be made of parts."""
    numel, count = spec.numel, indices.numel()
    if not 0 < count < numel or not kernels.writes_entries(indices, values):
        return None
    code = rice_code(indices, numel)
    front = count.to_bytes(count_bytes(numel), "little") if counted else b""
    if code is None or len(front) >= _MOST_LEAD:
        return None
    size_bytes, parameter = code
    kinds = {
        "indices": (torch.uint8, len(front) + size_bytes),
        "values": (torch.float32, count),
    }
    header, (code_at, values_at), total = frame(kinds)
    assert code_at % 4 == values_at % 4 == 0, "parts begin at multiples of the widest"
    words = torch.zeros(-(-total // 4), dtype=torch.int32, device=values.device)
    lead = front + bytes([1 + parameter])
    if not kernels.write_entries(
        words, code_at // 4, indices, parameter, lead, values, values_at // 4
    ):
        return None
    buffer = words.view(torch.uint8)
    if buffer.numel() != total:
        buffer = buffer[:total]
    parts = {
        "indices": buffer[code_at : code_at + len(front) + size_bytes],
        "values": buffer[values_at : values_at + 4 * count].view(torch.float32),
    }
    known: dict[str, tuple[int, ...]] = {"rice": (numel, count, len(front), parameter)}
    if counted and buffer.device.type != "cpu":  # which is slow to answer
        known["positions"] = (numel, count)
    kernels.note(parts["indices"], **known)
    return Payload(buffer, parts, payload_context(codec, spec), header=header)


def entries_payloads(
    codec: Codec,
    positions: Tensor,
    values: Tensor,
    counts: Sequence[int],
    spec: Spec,
    counted: bool,
    device: torch.device,
) -> list[Payload]:
    """Payloads on a device of the entries of several vectors, which lie one after another on the
    CPU, where `kernels.codes_entries`: the bytes of one after another, by one copy."""
    numel, context = spec.numel, payload_context(codec, spec)
    index_dtype, value_dtype = torch.uint8, torch.float32
    host, found = kernels.encode_entries(
        positions,
        values,
        counts,
        numel,
        count_bytes(numel) if counted else 0,
        lead_of(2),
        (code_of(index_dtype), code_of(value_dtype)),
        context,
        is_pinned=device.type == "cuda",
    )
    there = host.to(device, non_blocking=True)  # nobody writes to `host` again
    sizes = [size for part in found for size in (part.nbytes, part.gap)]
    buffers = there.split_with_sizes(sizes)[::2]
    copies = buffers if there is host else host.split_with_sizes(sizes)[::2]
    payloads: list[Payload] = []
    for buffer, copy, part, count in zip(buffers, copies, found, counts):
        value_nbytes = value_dtype.itemsize * count
        index_at = part.nbytes - part.index_nbytes
        places = {
            "indices": (index_at, (index_dtype, part.index_nbytes)),
            "values": (index_at - value_nbytes, (value_dtype, count)),
        }
        nbytes = part.index_nbytes + value_nbytes
        payloads.append(PiecePayload(buffer, copy, places, context, nbytes))
    return payloads


def scattered_entries(parts: Parts, spec: Spec, counted: bool) -> Tensor | None:
    """The flat vector in the parts of a payload; None where it has to be found otherwise."""
    packed, values = parts["indices"], parts["values"]
    numel, count = spec.numel, values.numel()
    front = count_bytes(numel) if counted else 0
    if not 0 < count < numel or packed.dtype != torch.uint8 or packed.numel() <= front + 1:
        return None
    if not kernels.scatters_entries(packed, values) or kernels.noted(packed, "host") is not None:
        return None  # what the host has it decodes, without waiting for the device
    out = torch.empty(numel, dtype=values.dtype, device=values.device)
    made = kernels.noted(packed, "rice")  # by ourselves: there is nothing to wait for
    known = made[3] if made is not None and made[:3] == (numel, count, front) else None
    return out if scatter_indices(packed, front, values, numel, out, known) else None
