"""What happens to rank 1 in the middle of an overlapped step, for tests to watch.

The functions are called in a process that becomes a node, or that starts nodes by forking. What
they do happens once for each folder: a run that is resumed goes on.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from gradwire.core.protocols import Bucket
from gradwire.experiment.processes.launch import signals
from gradwire.training.backward import PendingGradient
from gradwire.training.worker import TrainingWorker

STEP = 7


def kill() -> None:
    _in_the_middle(lambda: os.kill(os.getpid(), signal.SIGKILL))


def fail() -> None:
    def raise_error() -> None:
        raise ArithmeticError("the program of a bucket failed")

    _in_the_middle(raise_error)


def interrupt() -> None:
    """Ctrl-C of the command. The step goes on when this rank has got the signal, too."""

    def send_signal() -> None:
        os.kill(int(os.environ["GRADWIRE_PARENT"]), signal.SIGINT)
        handler: Any = signal.getsignal(signal.SIGINT)
        while not handler.__self__.wanted:
            time.sleep(0.001)

    _in_the_middle(send_signal)


def interrupt_twice() -> None:
    """The second Ctrl-C ends a rank at once, within the backward pass."""

    def send_signals() -> None:
        signals._SAME_SIGNAL_S = 0.0
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    _in_the_middle(send_signals)


def spoil() -> None:
    """One value of the gradient is NaN."""
    ready = PendingGradient.ready

    async def ready_and_spoil(self: PendingGradient, bucket: Bucket) -> Tensor:
        x = await ready(self, bucket)
        if _is_it(self.worker, bucket, self.step):
            x[-1] = float("nan")
            if not self.worker.plan.encoding_checks:
                self.worker.check_piece(x, bucket, self.step)
        return x

    PendingGradient.ready = ready_and_spoil  # type: ignore[method-assign]


def _in_the_middle(act: Callable[[], None]) -> None:
    """Acts when the gradient of a bucket is there, of which others have left."""
    ready = PendingGradient.ready

    async def ready_and_act(self: PendingGradient, bucket: Bucket) -> Tensor:
        x = await ready(self, bucket)
        if _is_it(self.worker, bucket, self.step):
            act()
        return x

    PendingGradient.ready = ready_and_act  # type: ignore[method-assign]


def _is_it(worker: TrainingWorker, bucket: Bucket, step: int) -> bool:
    buckets = worker.plan.buckets()
    if (worker.rank, step) != (1, STEP) or bucket != buckets[len(buckets) // 2]:
        return False
    try:
        Path("struck").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
