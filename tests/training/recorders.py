"""Recorders for tests on a CPU, with the properties of a CUDA graph that could go wrong."""

from collections.abc import Sequence

from torch import Tensor

from gradwire.training.evaluation.graphs import Part, Recording


class Replayer:
    """Keeps the work and does it again, into the memory of the first results.

    As with a CUDA graph nothing is there before the first replay.
    """

    def __init__(self) -> None:
        self.num_records = self.num_replays = self.num_waits = 0

    def record(self, work: Part) -> Recording:
        self.num_records += 1
        results = [result.clone() for result in work()]
        for result in results:
            result.fill_(-1)

        def replay() -> None:
            self.num_replays += 1
            for own, result in zip(results, work(), strict=True):
                own.copy_(result)

        return Recording(results, replay)

    def side_by_side(self, parts: Sequence[Part]) -> list[Sequence[Tensor]]:
        """In an order that nobody may rely on."""
        return [part() for part in reversed(parts)][::-1]

    def wait_for_others(self) -> None:
        self.num_waits += 1


class Refusing(Replayer):
    """Fails in the middle of the work."""

    def record(self, work: Part) -> Recording:
        self.num_records += 1
        work()
        raise RuntimeError("operation not permitted when stream is capturing")
