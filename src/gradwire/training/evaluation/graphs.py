"""Programs recorded on a device and replayed: one call of the host instead of hundreds.

The gradient of ResNet-20 starts 900 kernels, for which the host needs 12 ms. A recording of them
(a CUDA graph, `cuda_graphs.py`) starts all at once. It reads and writes memory of its own:
arguments are copied into it, and results out of it, since the next replay overwrites them. The
kernels are those of the plain call and so are the bits, so a program may be recorded whenever that
pays: when it has been called a few times.
"""

import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from gradwire.core.errors import GradwireWarning

Program = Callable[..., Sequence[Tensor]]
Part = Callable[[], Sequence[Tensor]]
RunParts = Callable[[Sequence[Part]], list[Sequence[Tensor]]]

# Plain calls before a program is recorded: the first ones compile it, load its kernels and choose
# algorithms, which no recording allows.
PLAIN_CALLS = 3
_MOST_RECORDINGS = 16  # each keeps its arguments and results in memory
# Of arguments. A recording keeps a copy of them, the results and what lies between; computations of
# more than that are not bound by the host.
_MOST_NBYTES = 1 << 31


class Recording(NamedTuple):
    """`replay` computes the results again, into the same memory."""

    results: Sequence[Tensor]
    replay: Callable[[], object]


class Recorder(Protocol):
    """A device that can record what is computed on it."""

    def record(self, work: Part) -> Recording:
        """Raises an error if the work cannot be recorded, and leaves the device as it was."""
        ...

    def side_by_side(self, parts: Sequence[Part]) -> list[Sequence[Tensor]]:
        """Does work whose parts do not depend on each other, for `record`."""
        ...

    def wait_for_others(self) -> None:
        """Lets what follows begin after replays that other streams of the device may still do."""
        ...


class OneByOne:
    """A program for n requests: the program for one request, once for each.

    Its arguments are those of the first request, then those of the second, and so on.
    """

    def __init__(self, program: Program, count: int) -> None:
        self.program = program
        self.count = count

    def __call__(self, *arguments: Tensor) -> Sequence[Tensor]:
        return self.run(_in_turn, arguments)

    def run(self, run_parts: RunParts, arguments: Sequence[Tensor]) -> Sequence[Tensor]:
        size = len(arguments) // self.count
        starts = range(0, len(arguments), size)
        parts = [partial(self.program, *arguments[i : i + size]) for i in starts]
        return [torch.cat(rows) for rows in zip(*run_parts(parts))]


def _in_turn(parts: Sequence[Part]) -> list[Sequence[Tensor]]:
    return [part() for part in parts]


class RecordedPrograms:
    """Calls programs, and records those that are called often.

    After a recording that failed, all that is not recorded yet is called plainly.
    """

    def __init__(self, recorder: Recorder, plain_calls: int = PLAIN_CALLS) -> None:
        self._recorder = recorder
        self._plain_calls = plain_calls
        self._calls: dict[Hashable, int] = {}
        self._recorded: dict[Hashable, _RecordedProgram] = {}
        self._has_failed = False
        self._lock = threading.Lock()  # memory of a recording is for one call at a time

    @property
    def num_recorded(self) -> int:
        return len(self._recorded)

    def call(
        self, key: Hashable, program: Program, arguments: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """The program's results, which nobody overwrites. `key`: equal for equal programs with
        arguments of equal shapes and types."""
        with self._lock:
            recorded = self._recorded.get(key)
            if recorded is None and self._is_due(key, arguments):
                recorded = self._record(key, program, arguments)
            if recorded is not None:
                self._recorder.wait_for_others()
                return recorded(arguments)
        return program(*arguments)

    def _is_due(self, key: Hashable, arguments: Sequence[Tensor]) -> bool:
        if self._has_failed or len(self._recorded) >= _MOST_RECORDINGS:
            return False
        if sum(argument.nbytes for argument in arguments) > _MOST_NBYTES:
            return False
        self._calls[key] = self._calls.get(key, 0) + 1
        return self._calls[key] > self._plain_calls

    def _record(
        self, key: Hashable, program: Program, arguments: Sequence[Tensor]
    ) -> "_RecordedProgram | None":
        try:
            memory = [_memory_like(argument) for argument in arguments]
            _copy(memory, arguments)
            if isinstance(program, OneByOne):
                work = partial(program.run, self._recorder.side_by_side, memory)
            else:
                work = partial(program, *memory)
            recorded = _RecordedProgram(program, memory, self._recorder.record(work))
        except Exception as error:  # an error of the program itself, the plain call raises again
            self._has_failed = True
            why = "cannot be recorded as a CUDA graph"
            if isinstance(error, torch.OutOfMemoryError):
                why = "is not recorded as a CUDA graph, for which there is too little memory"
            warnings.warn(
                f"the computation of gradients {why}, so each takes more time of the host; "
                f"results are the same. {type(error).__name__}: {error}",
                GradwireWarning,
                stacklevel=2,
            )
            return None
        del self._calls[key]
        self._recorded[key] = recorded
        return recorded


class _RecordedProgram:
    """A recording, and the memory that it reads arguments from."""

    def __init__(self, program: Program, memory: list[Tensor], recording: Recording) -> None:
        self._program = program  # holds the constants, which the recording reads, too
        self._memory = memory
        self._recording = recording

    def __call__(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        _copy(self._memory, arguments)
        self._recording.replay()
        return [result.clone() for result in self._recording.results]


def _memory_like(x: Tensor) -> Tensor:
    """With the same strides, for which a program may have been compiled."""
    repeats = any(stride == 0 < size - 1 for size, stride in zip(x.shape, x.stride()))
    if repeats:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _copy(memory: Sequence[Tensor], arguments: Sequence[Tensor]) -> None:
    """All arguments, with one call for each type."""
    kinds: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for own, given in zip(memory, arguments, strict=True):
        to, source = kinds.setdefault(own.dtype, ([], []))
        to.append(own)
        source.append(given)
    for to, source in kinds.values():
        torch._foreach_copy_(to, source)
