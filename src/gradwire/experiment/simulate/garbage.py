"""The garbage collector during a run: it does not look at what was there before.

The modules of PyTorch and of others are more than a million objects, and each full collection looks
at all of them: 0.2 s, every few hundred steps. A step makes thousands of objects, so these come
often. Objects that are there when a run begins, or has done its first steps, which import more, are
taken out of it until the run is over; later ones are collected as always.
"""

import gc
from types import TracebackType


class OldObjectsLeftAlone:
    """For `with`; does nothing where somebody has frozen objects already."""

    def __init__(self) -> None:
        self._is_ours = not gc.get_freeze_count()

    def __enter__(self) -> "OldObjectsLeftAlone":
        self.renew()
        return self

    def renew(self) -> None:
        """Leaves alone what is there now. Garbage among it is kept until the end."""
        if self._is_ours:
            gc.freeze()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_ours:
            gc.unfreeze()
