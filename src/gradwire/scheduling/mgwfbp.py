"""Merged-gradient WFBP (Shi et al. 2019, MG-WFBP): which neighbouring layers to merge.

An exchange of M bytes takes a + bM, and exchanges follow one another. Merging layer l into layer
l-1 saves one latency a, but the gradient of l waits for that of l-1. With tau_b(l) the time at
which the gradient of layer l is there, a group of the layers i to j-1 starts when the groups after
it are done and tau_b(i) has come:

    end(i) = min over j > i of max(end(j), tau_b(i)) + a + b (M_i + ... + M_{j-1})

end(0) is the earliest end of all exchanges: end(i) grows with end(j), so nothing is lost by keeping
only the best. Their Algorithm 1 looks at each layer once and merges it if that makes the next
exchange end earlier; what it has merged then may be worth less than it cost two layers on (see
tests/scheduling/test_mgwfbp.py), so this file computes the minimum instead, in L^2 steps.

Here an exchange of M bytes takes what the profile of the run says. That need not be a + bM: the
profile knows the payloads of the codec, their route and the time of coding. Only the time for which
an exchange holds up the next one counts, as exchanges overlap (core/profile.py); what remains of
the last one is added at the end.

Groups that were found are written into the expression, so that all ranks and a resumed run have the
same: `mgwfbp(groups=(2, 5))` has the tensors 0 and 1, 2 to 4, and 5 and more.

When to use it: where many tensors are small and each exchange has a fixed cost.
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

    @property
    def needs_prices(self) -> bool:
        return self.groups is None

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
    """The first tensors of all groups but the first, so that exchanges end as early as possible."""
    total, ends = profile.total_s, profile.backward_ends()
    num = len(tensors)
    # For the tensors from each one on: when their exchanges end, in how many groups, and where the
    # second group begins. Of groupings that end together the one with fewer groups is taken.
    best = [(0.0, 0, num)] * (num + 1)
    for first in reversed(range(num)):
        ready_s = total * ends[profile.first_layer(tensors[first])]
        options = []
        for stop in range(first + 1, num + 1):
            numel = tensors[stop - 1].stop - tensors[first].start
            end_s = max(best[stop][0], ready_s) + profile.exchange_s(numel)
            if first == 0:  # nothing follows: the step waits until its mean is there
                end_s += profile.delay_s(numel)
            options.append((end_s, best[stop][1] + 1, stop))
        best[first] = min(options)
    firsts = []
    first = best[0][2]
    while first < num:
        firsts.append(first)
        first = best[first][2]
    return firsts
