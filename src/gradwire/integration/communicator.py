"""The thread that exchanges messages of this rank, beside the user's training loop.

There is one per process group, and one for the servers of a job (`servers/`); hooks and optimizers
share it. It has connections of its own, so its messages and the user's collectives cannot be
confused. Programs count ranks within the group; errors name those that users know, of the whole job
(`Communicator.ranks`).
"""

import atexit
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.errors import (
    DifferentSettingsError,
    NonFiniteError,
    PeerLost,
    RefusedError,
    WireError,
)
from gradwire.core.node import Node
from gradwire.experiment.processes.headers import HEADERS
from gradwire.runtime.interpreter.interpreter import Program, R
from gradwire.runtime.process.engine import StuckError
from gradwire.runtime.process.gloo import GlooTransport
from gradwire.runtime.process.posting import PostingEngine

_CLOSE_S = 2.0  # at the end of the process: how long to wait for what is under way

_MAY_HAVE_FAILED = (
    "If rank {} still runs, its own exchange has failed, as where a compressor raises: its output "
    "has the error"
)

_open: dict[str, "Communicator"] = {}  # by the name of the process group


class Communicator:
    """Exchanges with other ranks over a transport, which must have `wake` and `close`. All ranks
    make theirs together.

    `num_workers`: how many of the transport's ranks train; None: all. `native`: means of
    vectors are formed by the transport's own all-reduce, which adds in another order than the
    simulator, and float16 in its own precision. `ranks`: those that users know, by rank of the
    transport; None: the same.
    """

    def __init__(
        self,
        transport: Any,
        num_workers: int | None = None,
        *,
        timeout_s: float = 300.0,
        native: bool = True,
        device: torch.device | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.world: Any = None  # see `shared_communicator`
        self.transport = transport
        self.engine = PostingEngine(transport, num_workers, timeout_s=timeout_s, native=native)
        self.ranks = tuple(range(self.engine.size) if ranks is None else ranks)
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
        """The number of ranks that train."""
        return self.engine.num_workers

    @property
    def is_alive(self) -> bool:
        """Whether it can still exchange anything."""
        return self._thread.is_alive() and self.engine.failure is None

    def post(
        self,
        program: Program[R],
        *,
        num_collectives: int | None = 0,
        borrowed: Tensor | None = None,
    ) -> "Future[R]":
        """Starts a program that exchanges something; all ranks post the same ones in order.

        `borrowed`: what it exchanges is written again as soon as the result is there.
        """
        return self.engine.post(program, num_collectives=num_collectives, borrowed=borrowed)

    def new_label(self) -> str:
        """For the messages of one more model. All ranks ask in the same order."""
        self._num_labels += 1
        return f"{self._num_labels}/"

    def close(self) -> None:
        """Ends when what is under way has ended."""
        self.engine.close()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():  # it waits for others
            self.engine.abort()
            self._thread.join(_CLOSE_S)
        self.transport.close()

    def post_after(self, program: Program[R]) -> "Future[R]":
        """Posts an exchange of tensors that are complete when the current stream is."""
        stream = self.stream
        if stream is None:
            return self.post(program, num_collectives=None)
        after = torch.cuda.current_stream(stream.device).record_event()

        async def after_event(node: Node) -> R:
            torch.cuda.current_stream(stream.device).wait_event(after)
            return await program(node)

        return self.post(after_event, num_collectives=None)

    def wait(self, future: "Future[R]") -> R:
        """The result of an exchange, for the current stream; raises what went wrong."""
        try:
            with torch.profiler.record_function("gradwire: wait"):
                return future.result()
        finally:
            if self.stream is not None:
                torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

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
    world: Any = dist.group.WORLD  # another one if torch.distributed is initialized again

    def make() -> Communicator:
        # Sorted, as those of the transport, which makes a group of its own.
        ranks = None if group is None else sorted(dist.get_process_group_ranks(group))
        transport = GlooTransport(headers=HEADERS, ranks=ranks, device=device, adds_halves=True)
        made = Communicator(
            transport, timeout_s=timeout_s, native=native, device=device, ranks=ranks
        )
        made.engine.explain = lambda error: _explain(error, made.ranks)
        return made

    return shared_communicator(f"{name} native" if native else name, make, world)


_NAME_RANKS = PeerLost, StuckError, WireError, NonFiniteError, RefusedError


def _explain(error: BaseException, ranks: Sequence[int]) -> BaseException:
    """The error with the ranks that users know. One of user's code stays as it is.

    A rank whose exchange fails leaves the others, and lives on.
    """

    def known(text: str) -> str:
        return re.sub(r"\brank (\d+)\b", lambda found: f"rank {_known(int(found[1]))}", text)

    def _known(rank: int) -> int:
        return ranks[rank] if rank < len(ranks) else rank

    # Of settings that differ the text has values of the user's, and the right ranks.
    if isinstance(error, _NAME_RANKS) and not isinstance(error, DifferentSettingsError):
        error.args = tuple(known(own) if isinstance(own, str) else own for own in error.args)
    for number, note in enumerate(notes := getattr(error, "__notes__", [])):
        if isinstance(error, PeerLost) or note.startswith("in the program of rank "):
            notes[number] = known(note)
    if isinstance(error, PeerLost):
        error.rank = _known(error.rank)
        error.args = (f"{error} {_MAY_HAVE_FAILED.format(error.rank)}",)
    return error


def shared_communicator(
    name: str, make: Callable[[], Communicator], world: Any = None
) -> Communicator:
    """That of this name, if it is alive and was made in the same `world`, or else a new one."""
    found = _open.get(name)
    if found is not None and found.world is not world:
        found.close()
        found = None
    if found is None or not found.is_alive:
        found = _open[name] = make()
        found.world = world
    return found


@atexit.register
def close_all() -> None:
    """Closes all communicators, so that the others see this rank leave and do not wait for it."""
    for communicator in _open.values():
        communicator.close()
    _open.clear()
