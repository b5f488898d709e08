"""The collective operations of Horovod and BytePS, with their names and arguments.

They run on torch.distributed, as the script's own collectives. All ranks call the same ones in the
same order: `name` is taken and not needed. Results carry no gradient.

An operation whose name has `async` returns a handle, for `poll` and `synchronize`; one whose name
ends in `_` or has `inplace` writes into the tensor that it is given.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.integration.own_compressor import is_compressor
from gradwire.integration.process import device_of_messages, size

Average, Sum, Adasum = "average", "sum", "adasum"


class Compression:
    """The compressions of Horovod, by their names there. Any expression of gradwire will do."""

    none = "identity"
    fp16 = "fp16"


def check_op(op: Any) -> None:
    """Refuses a reduction that is not offered."""
    if op == Adasum:
        raise ValueError(
            "op=Adasum is not offered: take Average with the learning rate scaled for it, or, to "
            "communicate less, a compression or gradwire.local_sgd"
        )
    if op not in (Average, Sum):
        raise ValueError(f"op is Average or Sum, got {op!r}")


@dataclass
class Handle:
    """A collective operation under way."""

    works: list[dist.Work | None]
    finish: Callable[[], Tensor]
    result: Tensor | None = field(default=None, repr=False)

    def is_done(self) -> bool:
        return self.result is not None or all(
            work is None or work.is_completed() for work in self.works
        )

    def wait(self) -> Tensor:
        if self.result is None:
            for work in self.works:
                if work is not None:
                    work.wait()
            self.result = self.finish()
        return self.result


def poll(handle: Handle) -> bool:
    """Whether the operation is done, so that `synchronize` would not wait."""
    return handle.is_done()


def synchronize(handle: Handle) -> Tensor:
    """Waits for an operation, and returns its result."""
    return handle.wait()


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """The mean, or the sum, over all ranks, as a new tensor."""
    sent, restore = _compressed(tensor, compression)
    scales = prescale_factor, postscale_factor
    return restore(_reduce(sent, None, average, op, *scales).wait())


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """`allreduce` into the tensor itself."""
    return _reduce(tensor, tensor, average, op, prescale_factor, postscale_factor).wait()


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Starts an `allreduce`."""
    return _reduce(tensor, None, average, op, prescale_factor, postscale_factor)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Starts an `allreduce_`."""
    return _reduce(tensor, tensor, average, op, prescale_factor, postscale_factor)


def declare(name: str, **options: Any) -> None:
    """BytePS announces tensors by name before it exchanges them; here that is not needed."""


def push_pull(
    tensor: Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    compression: Any = Compression.none,
) -> Tensor:
    """BytePS's name of `allreduce`."""
    return allreduce(tensor, average, name, compression)


def push_pull_inplace(
    tensor: Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
) -> Tensor:
    """BytePS's name of `allreduce_`."""
    return allreduce_(tensor, average, name)


def push_pull_async(
    tensor: Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
) -> Handle:
    """BytePS's name of `allreduce_async`."""
    return allreduce_async(tensor, average, name)


def byteps_push_pull(
    tensor: Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
) -> Handle:
    """BytePS's name of `allreduce_async_`."""
    return allreduce_async_(tensor, average, name)


def allgather(tensor: Tensor, name: str | None = None) -> Tensor:
    """The tensors of all ranks, joined along the first dimension, which may differ in length."""
    own = tensor.detach().to(device_of_messages()).contiguous()
    if not own.dim():
        raise ValueError("allgather joins along the first dimension, got a tensor without any")
    lengths = [torch.zeros(1, dtype=torch.int64, device=own.device) for _ in range(size())]
    dist.all_gather(lengths, torch.tensor([len(own)], device=own.device))
    longest = max(int(length) for length in lengths)
    padded = own.new_zeros((longest, *own.shape[1:]))
    padded[: len(own)] = own
    everyone = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(everyone, padded)
    joined = torch.cat([part[: int(length)] for part, length in zip(everyone, lengths)])
    return joined.to(tensor.device)


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """The tensor of one rank, as a new one on all."""
    return broadcast_(tensor.detach().clone(), root_rank, name)


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """The tensor of one rank, into those of all."""
    dist.broadcast(tensor.detach(), root_rank)
    return tensor


def barrier() -> None:
    """Waits until all ranks are here."""
    size()  # which says what is missing before init()
    dist.barrier()


def _reduce(
    tensor: Tensor,
    target: Tensor | None,
    average: bool | None,
    op: str | None,
    prescale: float,
    postscale: float,
) -> Handle:
    """Starts to add up the tensors of all ranks; None as target: a new one."""
    if average is not None and op is not None:
        raise ValueError("give op or average, not both: average=True is op=Average")
    if op is None:
        op = Sum if average is False else Average
    check_op(op)
    factor = postscale / size() if op == Average else postscale
    total = tensor.detach().clone() if target is None else target.detach()
    if prescale != 1.0:
        total.copy_(total * prescale)
    work = dist.all_reduce(total, async_op=True)

    def finish() -> Tensor:
        if factor != 1.0:
            total.copy_(total * factor)  # also for integers, which it truncates
        return total if target is None else target

    return Handle([work], finish)


def _compressed(tensor: Tensor, compression: Any) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """What is added up in place of a tensor, and how the tensor is had from that."""
    if compression == Compression.none:
        return tensor, lambda total: total
    if compression == Compression.fp16:
        is_float = tensor.is_floating_point()
        return tensor.half() if is_float else tensor, lambda total: total.to(tensor.dtype)
    if is_compressor(compression):
        sent, context = compression.compress(tensor)
        return sent, lambda total: compression.decompress(total, context)
    raise ValueError(
        f"compression={compression!r}: for one tensor take Compression.none, Compression.fp16, or "
        "an object with compress and decompress. Others keep a state from step to step, which a "
        "DistributedOptimizer has"
    )
