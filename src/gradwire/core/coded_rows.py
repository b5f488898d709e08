"""Encoding for n workers at once: the batched forms of `coded.encode` and `coded.encode_unfed`
(see `core/batched.py`)."""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.core.batched import Arguments, order_of_rows
from gradwire.core.codec import Codec, State
from gradwire.core.metering import ENCODE, ENCODE_FEEDBACK, PACK, Work
from gradwire.core.payload import Payload
from gradwire.core.rows import rows_in_memory, split_rows, stack_rows

# Where starting a kernel costs more than a CPU needs for the whole vector.
_DEVICES = frozenset({"cuda"})

Encoded = tuple[Payload, Tensor | None, None]


def takes_rows(device: torch.device) -> bool:
    """Whether workers encode together on a device."""
    return device.type in _DEVICES


class EncodedRows:
    """Rows of x and of residuals are encoded together, by a codec that can (`Fusion.encode_rows`).

    What a call costs depends on its payload, so it is known when all are encoded: `reports`.
    """

    reports = True

    def keys(self, args: Arguments) -> tuple[Hashable, Hashable] | None:
        codec, x, residual, state, key, is_sent, *out = (*args, True)[: max(6, len(args))]
        if not takes_rows(x.device) or not is_sent or out or state is not None:
            return None
        fusion = codec.fusion
        if x.dim() != 1 or fusion is None or not fusion.takes_rows:
            return None
        kind: Any = None
        if isinstance(residual, Tensor):
            kind = residual.dtype
        elif residual is not None:
            if not fusion.takes_motion:
                return None
            rule = residual.momentum, residual.scale, residual.nesterov, residual.masks
            kind = residual.residual.dtype, residual.velocity.dtype, residual.moved.dtype, *rule
        group = codec, x.shape, x.dtype, x.device, kind, key.seed, key.step, key.purpose
        return group, group

    def least_work(self, args: Arguments) -> list[Work]:
        codec, x, residual = args[:3]
        return [Work(codec, ENCODE if residual is None else ENCODE_FEEDBACK, x.numel(), 0)]

    def run(self, calls: Sequence[Arguments]) -> list[tuple[Encoded, list[Work]]] | None:
        codec, first, residual = calls[0][:3]
        order = order_of_rows([args[1] for args in calls])
        found = _encode_in_order([calls[place] for place in order])
        if found is None:
            return None
        operation, size = ENCODE if residual is None else ENCODE_FEEDBACK, first.numel()
        results: list[Any] = [None] * len(calls)
        for place, (payload, lost) in zip(order, found):
            nbytes = payload.nbytes  # encoding makes them, and sealing reads them
            work = [Work(codec, operation, size, nbytes), Work(None, PACK, 0, nbytes)]
            results[place] = (payload, lost, None), work
        return results


class UnfedRows:
    """The same without residuals, and with the state of a `Lifted` codec."""

    reports = True

    def __init__(self) -> None:
        self._rows = EncodedRows()

    def keys(self, args: Arguments) -> tuple[Hashable, Hashable] | None:
        codec, x, state, key = args
        return self._rows.keys((codec, x, None, state["codec"], key))

    def least_work(self, args: Arguments) -> list[Work]:
        return self._rows.least_work((*args[:2], None))

    def run(self, calls: Sequence[Arguments]) -> list[tuple[Any, list[Work]]] | None:
        found = self._rows.run([(codec, x, None, None, key) for codec, x, _, key in calls])
        if found is None:
            return None
        results: list[tuple[tuple[Payload, State], list[Work]]] = []
        for args, ((payload, _, inner), work) in zip(calls, found):
            # The bytes are complete as well, but the call does not say so.
            results.append(((payload, {**args[2], "codec": inner}), work[:1]))
        return results


def _encode_in_order(calls: Sequence[Arguments]) -> list[tuple[Payload, Tensor | None]] | None:
    """The payloads and what is lost, of calls in the order of their rows."""
    codec: Codec = calls[0][0]
    fusion, residuals = codec.fusion, [args[2] for args in calls]
    assert fusion is not None
    x, keys = stack_rows([args[1] for args in calls]), [args[4] for args in calls]
    if residuals[0] is None:
        payloads = fusion.encode_rows(x, None, keys, None)
        return None if payloads is None else [(payload, None) for payload in payloads]
    out = torch.empty_like(x)
    if isinstance(residuals[0], kernels.Motion):
        payloads = _with_motions(fusion, x, residuals, keys, out)
    else:
        kept = stack_rows([residual.to(x.device) for residual in residuals])
        payloads = fusion.encode_rows(x, kept, keys, out)
    return None if payloads is None else list(zip(payloads, split_rows(out)))


def _with_motions(
    fusion: Any, x: Tensor, motions: Sequence[kernels.Motion], keys: Sequence[Any], out: Tensor
) -> Sequence[Payload] | None:
    residual = stack_rows([motion.residual.to(x.device) for motion in motions])
    velocity = stack_rows([motion.velocity.to(x.device) for motion in motions])
    memory = rows_in_memory([motion.moved for motion in motions])
    moved = torch.empty_like(velocity) if memory is None else memory
    together = motions[0].with_vectors(residual, velocity, moved)
    payloads: Sequence[Payload] | None = fusion.encode_rows(x, together, keys, out)
    if memory is None and payloads is not None:
        for motion, row in zip(motions, moved):
            motion.moved.copy_(row)
    return payloads
