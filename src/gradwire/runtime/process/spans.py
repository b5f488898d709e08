"""Records the spans of one rank of a run on real processes.

Times are those of the machine's monotonic clock, which all processes of one machine share. Of a
message the sender knows when it handed it to the transport, the receiver when it was complete, or
when it took it from the transport if that does not say (`experiment/timeline/store.py` brings the
two together). A collective of the transport sends and receives from its start to its end.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from gradwire.core.node import Call, Send
from gradwire.runtime.interpreter.interpreter import Handler, Task
from gradwire.runtime.process.frames import tag_hash
from gradwire.runtime.spans import COMPUTE, RECEIVE, SEND, Span, SpanLog, describe_call

MAX_SPANS = 1_000_000  # per rank; what comes later is not recorded

clock = time.monotonic


class ProcessSpans:
    """Fills the log of one rank. `layers` are the names of the model's layers."""

    def __init__(self, rank: int, log: SpanLog, layers: Sequence[str] = ()) -> None:
        self.rank = rank
        self.log = log
        self._layers = layers
        # By span: the other rank, the hash of the tag, and the number among messages with these.
        self.messages: dict[int, tuple[int, int, int]] = {}
        self.collectives: dict[int, int] = {}  # by span: the number, the same on all ranks
        self._started: dict[int, tuple[str, float]] = {}  # by number: name and time
        self._num_sent: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._num_received: defaultdict[tuple[int, int], int] = defaultdict(int)

    def record(self, handlers: dict[type, Handler]) -> dict[type, Handler]:
        """Handlers that answer as these do, and write down when."""

        def send(task: Task, effect: Send) -> Any:
            start = clock()
            answer = handlers[Send](task, effect)
            if effect.dst != self.rank:
                tag, name = tag_hash(effect.tag), effect.label or "message"
                self._note(effect.dst, tag, self._num_sent)
                self._add(SEND, f"{name} to {effect.dst}", start)
            return answer

        def call(task: Task, effect: Call[Any]) -> Any:
            start = clock()
            answer = handlers[Call](task, effect)
            self._add(*describe_call(effect.function), start)
            return answer

        return {**handlers, Send: send, Call: call}

    def receive(self, src: int, tag: int, time_s: float | None = None) -> None:
        """A message was taken from the transport. It was complete at this time; None: now."""
        if src != self.rank:
            self._note(src, tag, self._num_received)
            end_s = clock() if time_s is None else time_s
            self._add(RECEIVE, f"message from {src}", end_s, end_s)

    def start_collective(self, number: int, label: str) -> None:
        """A collective was handed to the transport."""
        self._started[number] = f"all-reduce {label}".strip(), clock()

    def finish_collective(self, number: int, time_s: float | None = None) -> None:
        """The result of a collective was taken from the transport. It ended at this time."""
        found = self._started.pop(number, None)
        if found is not None:
            for lane in (SEND, RECEIVE):
                if len(self.log.spans) < MAX_SPANS:
                    self.collectives[len(self.log.spans)] = number
                self._add(lane, *found, time_s)

    def compute(self, start_s: float) -> None:
        """A gradient was computed until now."""
        self._add(COMPUTE, "gradient", start_s)

    def compute_layer(self, layer: int, start_s: float) -> None:
        """The gradient of a layer is there. With that of the last one came the forward pass."""
        name = self._layers[layer] if layer < len(self._layers) else f"layer {layer}"
        is_first = layer >= len(self._layers) - 1
        self._add(COMPUTE, f"{'forward, ' * is_first}backward {name}", start_s)

    def step_finished(self, step: int) -> None:
        self.log.step_finished(self.rank, step, None, clock())

    def _note(self, peer: int, tag: int, counts: defaultdict[tuple[int, int], int]) -> None:
        number = counts[peer, tag]
        counts[peer, tag] = number + 1
        if len(self.log.spans) < MAX_SPANS:
            self.messages[len(self.log.spans)] = (peer, tag, number)

    def _add(self, lane: str, name: str, start_s: float, end_s: float | None = None) -> None:
        """Adds a span that ended at this time; None: now."""
        if len(self.log.spans) < MAX_SPANS:
            end_s = clock() if end_s is None else end_s
            self.log.spans.append(Span(self.rank, lane, name, start_s, end_s, ready_s=start_s))
