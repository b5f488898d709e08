"""What sparsifiers share: how many elements a density keeps, and values back into place."""

from torch import Tensor

from gradwire.core.spec import Spec


def check_density(name: str, density: float) -> None:
    if not 0 < density <= 1:
        raise ValueError(
            f"{name}: density is the fraction kept and must lie in (0, 1], got {density}. "
            "To keep 1%, write 0.01."
        )


def num_kept(density: float, numel: int) -> int:
    """How many of `numel` elements are kept: the nearest whole number, but at least one."""
    return min(numel, max(1, round(density * numel)))


def scatter(values: Tensor, indices: Tensor, spec: Spec) -> Tensor:
    """A vector that is zero but for `values` at `indices`."""
    return values.new_zeros(spec.numel).scatter_(0, indices, values)
