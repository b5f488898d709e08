"""Means as sums of what each rank contributes, with partial sums that stay in range."""

from torch import Tensor

from gradwire.core.batched import elementwise
from gradwire.core.group import is_half


def addend(x: Tensor, count: int) -> Tensor:
    """What a rank adds to the sum of `count`.

    16-bit floats are divided before they are added: partial sums of them could overflow.
    """
    return x / count if is_half(x) else x


@elementwise
def divide_sum(total: Tensor, count: int) -> Tensor:
    """The mean, from the sum of `count` addends."""
    return total if is_half(total) else total / count
