"""The thread that exchanges messages of this rank, beside the user's training loop.

There is one per process group; hooks and optimizers share it. It has connections of its own, so its
messages and the user's collectives cannot be confused. Ranks are those within the group.
"""

import atexit
import threading
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from gradwire.experiment.processes.headers import HEADERS
from gradwire.runtime.interpreter.interpreter import Program, R
from gradwire.runtime.process.gloo import GlooTransport
from gradwire.runtime.process.posting import PostingEngine

_CLOSE_S = 2.0  # at the end of the process: how long to wait for what is under way

_open: dict[tuple[str, bool], "Communicator"] = {}  # by the name of the process group, and native


class Communicator:
    """Exchanges with the other ranks of a process group. All its ranks make theirs together.

    `native`: means of uncompressed vectors are formed by the all-reduce of gloo, which adds in
    another order than the simulator.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        timeout_s: float = 300.0,
        native: bool = True,
        device: torch.device | None = None,
    ) -> None:
        ranks = None if group is None else dist.get_process_group_ranks(group)
        self.world = dist.group.WORLD  # another one if torch.distributed is initialized again
        self.transport = GlooTransport(headers=HEADERS, ranks=ranks, device=device)
        self.engine = PostingEngine(self.transport, timeout_s=timeout_s, native=native)
        self.stream: torch.cuda.Stream | None = None  # on which this thread codes
        if device is not None and device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
        self._num_labels = 0
        self._thread = threading.Thread(target=self._serve, name="gradwire-exchange", daemon=True)
        self._thread.start()

    @property
    def rank(self) -> int:
        return self.engine.rank

    @property
    def size(self) -> int:
        return self.engine.size

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def post(self, program: Program[R], *, num_collectives: int | None = 0) -> "Future[R]":
        """Starts a program that exchanges something; all ranks post the same ones in order."""
        return self.engine.post(program, num_collectives=num_collectives)

    def new_label(self) -> str:
        """For the messages of one more model. All ranks ask in the same order."""
        self._num_labels += 1
        return f"{self._num_labels}/"

    def close(self) -> None:
        """Ends when what is under way has ended."""
        self.engine.close()
        self._thread.join(_CLOSE_S)
        self.transport.close()

    def _serve(self) -> None:
        context: Any = nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
        with torch.no_grad(), context:
            self.engine.serve()


def communicator_of(
    group: dist.ProcessGroup | None, *, timeout_s: float, native: bool, device: torch.device | None
) -> Communicator:
    """That of a process group (None: of all ranks). All its ranks call this together."""
    if not dist.is_initialized():
        raise RuntimeError(
            "gradwire exchanges with the other ranks of torch.distributed, which is not "
            "initialized: call torch.distributed.init_process_group() first, and start the script "
            "with torchrun"
        )
    name = dist.group.WORLD.group_name if group is None else group.group_name  # type: ignore[union-attr]
    found = _open.get((name, native))
    if found is not None and found.world is not dist.group.WORLD:
        found.close()
        found = None
    if found is None or not found.is_alive:
        found = Communicator(group, timeout_s=timeout_s, native=native, device=device)
        _open[name, native] = found
    return found


@atexit.register
def close_all() -> None:
    """Closes all communicators, so that the others see this rank leave and do not wait for it."""
    for communicator in _open.values():
        communicator.close()
    _open.clear()
