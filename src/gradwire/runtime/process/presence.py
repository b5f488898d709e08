"""Who is there, as one rank knows it: who was lost, who left, and who is done with a run."""

from collections import defaultdict

from gradwire.core.errors import PeerLost


class Presence:
    """Of all other ranks, from the point of view of `rank`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.lost: dict[int, tuple[float, str]] = {}  # when that was noticed, and why
        # Who said goodbye, and because of the loss of whom (-1: of nobody).
        self.left: dict[int, int] = {}
        self._num_done: defaultdict[int, int] = defaultdict(int)  # runs, by rank

    def __contains__(self, rank: int) -> bool:
        return rank not in self.lost and rank not in self.left

    @property
    def gone(self) -> frozenset[int]:
        return frozenset((*self.lost, *self.left))

    def joins(self, rank: int) -> None:
        """It has nothing to do with who it was before."""
        self.lost.pop(rank, None)
        self.left.pop(rank, None)
        self._num_done.pop(rank, None)

    def done(self, rank: int, num_runs: int) -> None:
        self._num_done[rank] = max(self._num_done[rank], num_runs)

    def are_done(self, ranks: range, num_runs: int) -> bool:
        """Whether the others of these are done with so many runs, or gone."""
        return all(
            rank == self._rank or self._num_done[rank] >= num_runs or rank not in self
            for rank in ranks
        )

    def why_gone(self, rank: int, now: float) -> PeerLost:
        """Why nothing will come from this rank."""
        cause = self.left.get(rank, -1)
        if cause not in (-1, rank, self._rank):
            why = f"rank {rank} says so, and left because of it"
            noticed_s, rank = now, cause
        else:
            noticed_s, why = self.lost.get(rank, (now, "it said goodbye"))
        error = PeerLost(rank, noticed_s, noticed_s)
        error.add_note(f"rank {rank}: {why}")
        return error
