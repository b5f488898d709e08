"""Encoding for n workers at once: the batched form of `coded.encode` (see `core/batched.py`)."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.core.batched import Arguments
from gradwire.core.codec import Codec
from gradwire.core.metering import ENCODE, ENCODE_FEEDBACK, PACK, Work
from gradwire.core.payload import Payload
from gradwire.core.rows import split_rows, stack_rows

# Where starting a kernel costs more than a CPU needs for the whole vector.
_DEVICES = frozenset({"cuda"})

Encoded = tuple[Payload, Tensor | None, None]


class EncodedRows:
    """Rows of x and of residuals are encoded together, by a codec that can (`Fusion.encode_rows`).

    What a call costs depends on its payload, so it is known when all are encoded: `reports`.
    """

    reports = True

    def keys(self, args: Arguments) -> tuple[Hashable, Hashable] | None:
        codec, x, residual, state, key, is_sent, *out = (*args, True)[: max(6, len(args))]
        if x.device.type not in _DEVICES or not is_sent or out or state is not None:
            return None
        if x.dim() != 1 or isinstance(residual, kernels.Motion):
            return None
        if codec.fusion is None or not codec.fusion.takes_rows:
            return None
        kind = None if residual is None else residual.dtype
        group = codec, x.shape, x.dtype, x.device, kind, key.seed, key.step, key.purpose
        return group, group

    def least_work(self, args: Arguments) -> list[Work]:
        codec, x, residual = args[:3]
        return [Work(codec, ENCODE if residual is None else ENCODE_FEEDBACK, x.numel(), 0)]

    def run(self, calls: Sequence[Arguments]) -> list[tuple[Encoded, list[Work]]] | None:
        codec, first, residual = calls[0][:3]
        x, kept, out = stack_rows([args[1] for args in calls]), None, None
        if residual is not None:
            kept = stack_rows([args[2].to(x.device) for args in calls])
            out = torch.empty_like(x)
        payloads = codec.fusion.encode_rows(x, kept, [args[4] for args in calls], out)
        if payloads is None:
            return None
        lost: Sequence[Tensor | None] = [None] * len(calls) if out is None else split_rows(out)
        operation = ENCODE if residual is None else ENCODE_FEEDBACK
        return [
            ((payload, left, None), _work(codec, operation, first.numel(), payload.nbytes))
            for payload, left in zip(payloads, lost)
        ]


def _work(codec: Codec, operation: str, numel: int, nbytes: int) -> list[Work]:
    """What encoding one payload, and sealing it, reports."""
    return [Work(codec, operation, numel, nbytes), Work(None, PACK, 0, nbytes)]
