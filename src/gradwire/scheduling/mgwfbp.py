"""Merged-gradient WFBP (Shi et al. 2019, MG-WFBP, Alg. 1): which neighbouring layers to merge.

An exchange of M bytes takes a + bM. Merging layer l into layer l-1 saves one latency a, but the
gradient of l waits for that of l-1. With tau_b(l) the time at which the gradient of layer l is
there and tau_c(l) the time at which its exchange starts,

    tau_c(l) = max(tau_c(l+1) + t_c(l+1), tau_b(l))                       (their eq. 8)

merging is better exactly if the gradient of layer l-1 is there before the latency of the exchange
of l would have passed (their Theorem 1):

    tau_b(l-1) < tau_c(l) + a

Layers are looked at from the last to the first. a and b come from the profile of the run. Groups
that were found are written into the expression, so that all ranks and a resumed run have the same:
`mgwfbp(groups=(2, 5))` has the tensors 0 and 1, 2 to 4, and 5 and more.

When to use it: where many tensors are small and the network has a latency.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradwire.core.profile import Profile
from gradwire.core.protocols import Backward, Bucket, Reduce, Scheduling
from gradwire.scheduling._ready import exchange_when_ready, merge


@dataclass(frozen=True, repr=False)
class MGWFBP(Scheduling):
    """Merge the layers whose exchanges would only wait for one another."""

    groups: tuple[int, ...] | None = None  # the first tensors of all groups but the first

    paper = "Shi et al. 2019, MG-WFBP"
    examples = ("mgwfbp", "mgwfbp(groups=(2,))")

    def __post_init__(self) -> None:
        groups = self.groups or ()
        if any(a >= b for a, b in zip((0, *groups), groups)):
            raise ValueError(
                f"{self!r}: groups are numbers of tensors from 1 on, each larger than the one "
                "before"
            )

    @property
    def overlaps(self) -> bool:
        return True

    def resolve(self, tensors: Sequence[Bucket], profile: Profile) -> "MGWFBP":
        if self.groups is not None:
            return self
        return replace(self, groups=tuple(merged_groups(tensors, profile)))

    def buckets(self, tensors: Sequence[Bucket], profile: Profile) -> list[Bucket]:
        groups = merged_groups(tensors, profile) if self.groups is None else self.groups
        if groups and groups[-1] >= len(tensors):
            raise ValueError(f"{self!r}: the model has only {len(tensors)} tensors")
        bounds = [0, *groups, len(tensors)]
        return [merge(tensors[start:stop]) for start, stop in itertools.pairwise(bounds)]

    async def exchange(self, backward: Backward, buckets: Sequence[Bucket], reduce: Reduce) -> None:
        await exchange_when_ready(backward, buckets, reduce)


def merged_groups(tensors: Sequence[Bucket], profile: Profile) -> list[int]:
    """The first tensors of all groups but the first: Algorithm 1."""
    total, ends = profile.total_s, profile.backward_ends()
    ready = [total * ends[profile.first_layer(tensor)] for tensor in tensors]
    firsts = []  # of groups, last one first
    pending = 0  # values of the tensors that are merged into the one that is looked at
    free_s = 0.0  # when the exchanges of later groups are over
    for number in reversed(range(1, len(tensors))):
        pending += tensors[number].numel
        starts_s = max(free_s, ready[number])
        if ready[number - 1] < starts_s + profile.latency_s:
            continue  # merged into the tensor before it
        firsts.append(number)
        free_s = starts_s + profile.exchange_s(pending)
        pending = 0
    return firsts[::-1]
