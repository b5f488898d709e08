"""What one rank knows of its peers: which were lost, which left, which are done with a run."""

from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from gradwire.core.errors import PeerLost


class PeerStatus:
    """The status of all other ranks, as `rank` knows it; `clock` returns the time."""

    def __init__(self, rank: int, clock: Callable[[], float]) -> None:
        self._rank, self._clock = rank, clock
        self.lost: dict[int, tuple[float, str]] = {}  # when that was noticed, and why
        # Peers that said goodbye, and the rank whose loss made them leave (-1: none).
        self.left: dict[int, int] = {}
        self.gone: ChainMap[int, Any] = ChainMap(self.lost, self.left)
        self._num_done: defaultdict[int, int] = defaultdict(int)  # runs, by rank

    def join(self, rank: int) -> None:
        """A new incarnation of this rank has joined."""
        self.lost.pop(rank, None)
        self.left.pop(rank, None)
        self._num_done.pop(rank, None)

    def report_done(self, rank: int, num_runs: int) -> None:
        """The rank is done with its first `num_runs` runs."""
        self._num_done[rank] = max(self._num_done[rank], num_runs)

    def are_done(self, ranks: Iterable[int], num_runs: int) -> bool:
        """Whether the others of these are done with so many runs, or gone."""
        return all(
            rank == self._rank or self._num_done[rank] >= num_runs or rank in self.gone
            for rank in ranks
        )

    def lose(self, rank: int, why: str) -> None:
        """It is noticed now that this rank is lost."""
        self.lost[rank] = self._clock(), why

    def error(self, rank: int) -> PeerLost:
        """Why nothing will come from this rank."""
        now = self._clock()
        cause = self.left.get(rank, -1)
        if cause not in (-1, rank, self._rank):
            why = f"rank {rank} reports it, and left because of it"
            noticed_s, rank = now, cause
        else:
            noticed_s, why = self.lost.get(rank, (now, "it said goodbye"))
        error = PeerLost(rank, noticed_s, noticed_s)
        error.add_note(f"rank {rank}: {why}")
        return error
