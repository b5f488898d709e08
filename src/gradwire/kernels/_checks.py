"""What several operations check of their arguments before a backend sees them."""

from collections.abc import Iterator

import torch
from torch import Tensor

from gradwire.kernels._dispatch import cpu_backend, runs_triton
from gradwire.kernels._motion import Motion, Residual


def fuses(*tensors: Residual | None) -> bool:
    """Whether the fused kernels below run in C or Triton on these float32 vectors.

    They are there for speed alone; for everything else codecs compose torch operations.
    """
    known: torch.device | None = None
    for x in tensors:
        if x is None:
            continue
        if isinstance(x, Motion):
            if not fuses(*_vectors(x)):
                return False
            continue
        if x.dtype != torch.float32:  # nor is the dtype of an array, which callers refuse
            return False
        device = x.device
        if device != known and not _serves(device):
            return False
        known = device
    return known is not None or _serves(torch.device("cpu"))


def _serves(device: torch.device) -> bool:
    return runs_triton(device) or (device.type == "cpu" and cpu_backend() == "native")


def flat(x: Tensor) -> Tensor:
    """As a vector: most are, and even a view of all takes time."""
    return x if x.dim() == 1 else x.reshape(-1)


def flat_or_none(x: Tensor | None) -> Tensor | None:
    return None if x is None else flat(x)


def _vectors(motion: Motion) -> Iterator[Tensor | None]:
    yield from (motion.residual, motion.velocity, motion.moved)


def check_motion(operation: str, x: Tensor, motion: Motion, out: Tensor | None) -> None:
    for vector in (motion.residual, motion.velocity):
        check_fused(operation, x, vector, out)
        check_fused(operation, x, vector, motion.moved)
    check_apart(operation, motion, out)


def check_apart(operation: str, motion: Motion, out: Tensor | None) -> None:
    """That what is left and the velocity are not written to one memory."""
    if out is None or (out.numel() and out.data_ptr() == motion.moved.data_ptr()):
        raise ValueError(f"{operation} needs two vectors for what it leaves and for the velocity")


def check_fused(operation: str, x: Tensor, residual: Tensor | None, out: Tensor | None) -> None:
    count, device = x.numel(), x.device
    for tensor in (x,) if residual is None else (x, residual):
        if tensor.dtype != torch.float32 or tensor.numel() != count or tensor.device != device:
            raise ValueError(
                f"{operation} takes float32 of equal length on one device, got {count} x "
                f"{x.dtype} and {tensor.numel()} x {tensor.dtype}"
            )
    if out is None:
        return
    check_out(operation, out, count)
    if out.device != device:
        raise ValueError(f"{operation} cannot write what is on {device} to {out.device}")
    place = out.data_ptr()
    if count and (place == x.data_ptr() or (residual is not None and place == residual.data_ptr())):
        raise ValueError(f"{operation} cannot write its result over an input")


def check_rows(operation: str, x: Tensor, residual: Tensor | None, out: Tensor | None) -> None:
    for tensor in (x, residual, out):
        if tensor is not None and (tensor.dim() != 2 or tensor.shape != x.shape):
            raise ValueError(
                f"{operation} takes matrices of equal shape, got {list(x.shape)} and "
                f"{list(tensor.shape)}"
            )
    if out is not None and not out.is_contiguous():
        raise ValueError(f"{operation} needs contiguous memory for its result")
    check_fused(operation, x, residual, None if out is None else out.view(-1))


def check_out(operation: str, out: Tensor | None, numel: int) -> None:
    if out is not None and (
        out.dtype != torch.float32 or out.shape != (numel,) or not out.is_contiguous()
    ):
        raise ValueError(
            f"{operation} needs a contiguous float32 [{numel}] for its result, got {out.dtype} "
            f"{list(out.shape)}"
        )


def check_scale(operation: str, scale: Tensor, count: int, bucket: int) -> None:
    if scale.dtype != torch.float32 or scale.numel() != -(-count // bucket):
        raise ValueError(
            f"{operation} takes {-(-count // bucket)} scales of float32, got {scale.numel()} of "
            f"{scale.dtype}"
        )


def check_count(operation: str, name: str, count: int) -> None:
    if count < 0:
        raise ValueError(f"{operation} needs {name} >= 0, got {count}")


def check_packed(operation: str, packed: Tensor, num_bits: int) -> None:
    if packed.dtype != torch.uint8:
        raise ValueError(f"{operation} takes packed bits as uint8, got {packed.dtype}")
    expected = -(-num_bits // 8)
    if packed.numel() != expected:
        raise ValueError(
            f"{operation} expects {expected} bytes for {num_bits} bits, got {packed.numel()}"
        )
