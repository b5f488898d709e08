"""What codecs check of what they are given, and of what they receive."""

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.core.errors import NonFiniteError, WireError
from gradwire.core.group import is_half
from gradwire.core.payload import Payload
from gradwire.core.rows import row_of


def check_encoded(compression: object, x: Tensor, payload: Payload, shows: Tensor | str) -> None:
    """Refuses x, with its residual, if `shows` is not finite, which it is if and only if they are.

    A name is that of a part. On an accelerator it is done when parts or bytes of the payload are
    asked for: before, nobody waits.
    """
    shape = x.shape

    def check() -> None:
        shown = payload.unchecked(shows) if isinstance(shows, str) else shows
        if not is_finite(shown):
            raise non_finite(compression, shape)

    payload.check_later(check)


def non_finite(compression: object, shape: torch.Size) -> NonFiniteError:
    return NonFiniteError(
        f"NaN or infinity in a tensor of shape {list(shape)} given to {compression!r}"
    )


def check_tensor(compression: object, x: object) -> None:
    """Refuses what is no tensor, such as an array of numpy."""
    if not isinstance(x, Tensor):
        kind = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
        convert = "from_numpy" if kind.startswith("numpy.") else "tensor"
        raise ValueError(
            f"{compression!r} encodes torch tensors, got {kind}. Convert it: torch.{convert}(x)."
        )


def without_graph(x: Tensor) -> Tensor:
    """x without its graph; most have none."""
    return x.detach() if x.requires_grad else x


def in_shape(flat: Tensor, x: Tensor) -> Tensor:
    """A vector in the shape of x, which is mostly one already."""
    return flat if x.dim() == 1 else flat.reshape(x.shape)


def corrected(x: Tensor, residual: Tensor | None) -> Tensor:
    """x + residual, without its graph; 16-bit sums saturate, for infinity would stay for good."""
    x = x.detach()
    if residual is None:
        return x
    residual = residual.to(x.device)
    if not is_half(x):
        return x + residual
    largest = torch.finfo(x.dtype).max
    return (x.float() + residual.float()).clamp(-largest, largest).to(x.dtype)


def is_finite(x: Tensor) -> bool:
    """Whether every element is finite."""
    found = row_of(x)
    if found is not None:  # the workers' other rows will be asked about, too: one read for all
        return found[0].is_finite(found[1])
    # One cheap pass: a sum is finite if all terms are, unless it overflows; then look closely.
    return bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())


def expect(part: Tensor, name: str, numel: int, dtype: torch.dtype) -> Tensor:
    """The part, if it has the length and dtype it must have."""
    if part.numel() != numel or part.dtype != dtype:
        raise WireError(
            f"{name}: {part.numel()} x {part.dtype}, expected {numel} x {dtype}: "
            "the payload belongs to another tensor or codec"
        )
    return part


def expect_scale(part: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """A vector of scales: the right length, finite and not negative."""
    expect(part, "scale", numel, dtype)
    if kernels.noted(part, "is_own"):  # by our own kernels, of what was finite
        return part
    known = kernels.noted(part, "host")  # on an accelerator, if its bytes are known here
    shown = part if known is None else known
    if not bool(((shown >= 0) & torch.isfinite(shown)).all()):
        raise WireError("scale: negative or not finite")
    return part


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """Scales and norms travel as float32, as float64 where the tensor is float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def clamp_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as `dtype`; what lies beyond its range becomes its largest value, not infinity."""
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)
