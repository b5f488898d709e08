"""What a codec promises of its errors."""

from collections.abc import Sequence
from dataclasses import dataclass

# Of the squared norm: codecs that keep as much, such as fp8, are used without feedback.
_NEARLY_ALL = 0.9


@dataclass(frozen=True, slots=True)
class Guarantee:
    """The class of a codec C as theory has it; None where it does not belong to the class.

    omega: E C(x) = x and E|C(x) - x|^2 <= omega |x|^2     (unbiased, relative variance)
    delta: E|C(x) - x|^2 <= (1 - delta) |x|^2              (contraction)

    It holds if every element is zero or has a magnitude in `within`. Without that it holds in the
    whole normal range of the tensor's dtype, as far as what is decoded lies in that range too:
    rounding up at random, or a factor of d/k, may lead beyond its upper end, where C(x) saturates.
    """

    omega: float | None = None
    delta: float | None = None
    grows: bool = False  # in neither class, and known to let errors grow that are fed back
    within: tuple[float, float] | None = None  # the smallest and the largest magnitude

    @property
    def contracts(self) -> bool:
        """Whether errors fed back die out, as far as theory says; unknown counts as yes."""
        if self.delta is not None:
            return True
        return not self.grows and (self.omega is None or self.omega < 1)

    def drops(self, biased: bool = False) -> bool:
        """Whether something is lost for good; `biased` is the answer where the class is unknown."""
        if self.omega is not None:
            return False
        return biased if self.delta is None else self.delta < _NEARLY_ALL


LOSSLESS = Guarantee(omega=0.0, delta=1.0)


def overlap(guarantees: Sequence[Guarantee]) -> tuple[float, float] | None:
    """The magnitudes for which all of them hold, as `Guarantee.within`."""
    ranges = [each.within for each in guarantees if each.within is not None]
    if not ranges:
        return None
    return max(low for low, _ in ranges), min(high for _, high in ranges)


def weakest(guarantees: Sequence[Guarantee]) -> Guarantee:
    """What holds for parts of a tensor, or for senders, that have a guarantee each."""
    omegas, deltas = [each.omega for each in guarantees], [each.delta for each in guarantees]
    return Guarantee(
        omega=None if None in omegas else max(o for o in omegas if o is not None),
        delta=None if None in deltas else min(d for d in deltas if d is not None),
        grows=not all(each.contracts for each in guarantees),
        within=overlap(guarantees),
    )
