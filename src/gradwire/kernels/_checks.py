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
    vectors = [x for x in _vectors(*tensors) if x is not None]
    if any(x.dtype != torch.float32 for x in vectors):
        return False
    devices = {x.device for x in vectors}
    return all(
        runs_triton(device) or (device.type == "cpu" and cpu_backend() == "native")
        for device in devices or {torch.device("cpu")}
    )


def flat(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.reshape(-1)


def _vectors(*tensors: Residual | None) -> Iterator[Tensor | None]:
    for tensor in tensors:
        if isinstance(tensor, Motion):
            yield from (tensor.residual, tensor.velocity, tensor.moved)
        else:
            yield tensor


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
    for tensor in (x, residual):
        if tensor is not None and (
            tensor.dtype != torch.float32
            or tensor.numel() != x.numel()
            or tensor.device != x.device
        ):
            raise ValueError(
                f"{operation} takes float32 of equal length on one device, got {x.numel()} x "
                f"{x.dtype} and {tensor.numel()} x {tensor.dtype}"
            )
    check_out(operation, out, x.numel())
    if out is not None and out.device != x.device:
        raise ValueError(f"{operation} cannot write what is on {x.device} to {out.device}")
    if (
        out is not None
        and out.numel()
        and out.data_ptr()
        in (
            x.data_ptr(),
            0 if residual is None else residual.data_ptr(),
        )
    ):
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
