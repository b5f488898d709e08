"""NaN in a gradient, looked for where it shows: in the mean of all.

To look into a gradient the host must wait for it, on an accelerator, and then prepares the exchange
while the device has nothing to do. A mean of vectors that are added as they are is finite only if
all of them are, and it is looked at anyway, before the update. So encoding need not look, where
virtual workers send such vectors and the gradients of all lie in one memory: the sender of NaN is
found there, and raises the error that encoding would have raised.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from gradwire.core.protocols import Bucket
from gradwire.core.rows import Rows, row_of

if TYPE_CHECKING:
    from gradwire.training.worker import TrainingWorker


class Postponed:
    """The pieces of one worker's gradient in one step that nobody has looked into."""

    def __init__(self, worker: "TrainingWorker") -> None:
        self._worker = worker
        self._pieces: list[tuple[Bucket, Tensor, Rows]] = []

    def add(self, bucket: Bucket, x: Tensor) -> None:
        """A piece that is about to be encoded: as a finite one, if the mean shows whether it is."""
        found, worker = row_of(x), self._worker
        if not worker.plan.mean_shows_all or found is None or len(found[0].whole) != worker.size:
            return
        found[0].is_trusted = True
        self._pieces.append((bucket, x, found[0]))

    def sent_by_another(self, step: int) -> bool:
        """The mean is not finite: raises if that is due to this worker. Whether another one sent
        NaN, whose program then raises."""
        for _, _, rows in self._pieces:
            rows.is_trusted = False
        for bucket, x, _ in self._pieces:
            self._worker.check_piece(x, bucket, step)
        size = self._worker.size
        return any(not rows.is_finite(rank) for _, _, rows in self._pieces for rank in range(size))
