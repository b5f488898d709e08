"""Records the spans of a run on the simulator, from its effects and its events.

Handlers are wrapped for the time of a run, so a run without a log costs nothing for it. Of messages
that got lost and were sent again, the last attempt is recorded.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gradwire.core.node import Begin, Call, Compute, Open, Send, Tag
from gradwire.runtime.interpreter.interpreter import WAITING, Handler, Task
from gradwire.runtime.network.links import Message, Parcel
from gradwire.runtime.network.network import Network
from gradwire.runtime.spans import COMPUTE, RECEIVE, SEND, Span, SpanLog, describe_call
from gradwire.runtime.virtual.computation import VirtualComputation

if TYPE_CHECKING:
    from gradwire.runtime.virtual.engine import VirtualEngine


class VirtualSpans:
    """Fills a log. `layers` are the names of the layers whose times the engine knows."""

    def __init__(self, log: SpanLog, network: Network, layers: Sequence[str] = ()) -> None:
        self.log = log
        self._network = network
        self._layers = layers
        # Labels of messages under way, and when they were handed over.
        self._under_way: defaultdict[Any, deque[tuple[str, float]]] = defaultdict(deque)
        self._num_messages = 0

    def record(self, engine: "VirtualEngine", handlers: dict[type, Handler]) -> dict[type, Handler]:
        """Handlers that answer as these do, and write down what was asked."""
        spans = self.log.spans

        def send(task: Task, effect: Send) -> Any:
            if effect.dst != task.rank:
                key = _key(task.rank, effect.dst, effect.tag, effect.data)
                self._under_way[key].append((effect.label, engine.time_s))
            return handlers[Send](task, effect)

        def call(task: Task, effect: Call[Any]) -> Any:
            start = max(engine.time_s, engine.coding_free_s(task.rank))
            answer = handlers[Call](task, effect)
            if answer is WAITING:
                lane, name = describe_call(effect.function)
                spans.append(Span(task.rank, lane, name, start, engine.coding_free_s(task.rank)))
            return answer

        def compute(task: Task, effect: Compute[Any]) -> Any:
            start = engine.time_s
            end = start + engine.gradient_s(task.rank, effect.request)
            spans.append(Span(task.rank, COMPUTE, "gradient", start, end))
            return handlers[Compute](task, effect)

        def begin(task: Task, effect: Begin) -> Any:
            begun = handlers[Begin](task, effect)
            if effect.is_open:
                self._add_layers(task.rank, begun)
            return begun

        def open_layer(task: Task, effect: Open) -> Any:
            begun = effect.computation
            assert isinstance(begun, VirtualComputation)
            was_done = begun.is_forward_done
            answer = handlers[Open](task, effect)
            if begun.is_forward_done and not was_done:
                self._add_layers(task.rank, begun)
            return answer

        return {
            **handlers,
            Send: send,
            Call: call,
            Compute: compute,
            Begin: begin,
            Open: open_layer,
        }

    def receive_head(self, head_s: float, tail_s: float, message: Message) -> None:
        """A message's first bit reaches its receiver, and the last one will at `tail_s`."""
        src, dst, _, _, nbytes = message
        start = head_s - self._network.latency_s[src]
        left = start + nbytes / self._network.bandwidth[src]
        if self._network.burst:  # it may have left at once
            left = min(left, max(start, tail_s - self._network.latency_s[src]))
        received = max(head_s, tail_s - nbytes / self._network.bandwidth[dst])
        if left + self._network.latency_s[src] >= tail_s:  # no queue: the sender sets the pace
            received = head_s
        self._add_message(message, start, left, received, tail_s, head_s)

    def receive_tail(self, tail_s: float, message: Message) -> None:
        """A message is there. In a network with a topology this is when it is recorded."""
        src, dst = message[:2]
        fabric = self._network.fabric
        if src == dst or fabric is None:
            return
        latency_s = fabric.latency_s(src, dst)
        start = self._handed_over(message)
        self._add_message(message, start, tail_s - latency_s, start + latency_s, tail_s)

    def receive_parcel(self, tail_s: float, parcel: Parcel) -> None:
        """A message is there, in a network with faults."""
        message = parcel.message
        if self._network.fabric is not None:
            self.receive_tail(tail_s, message)
            return
        src, dst, _, _, nbytes = message
        start = parcel.left_s - nbytes / self._network.bandwidth[src]
        head = start + self._network.latency_s[src]
        received = max(head, tail_s - nbytes / self._network.bandwidth[dst])
        self._add_message(message, start, parcel.left_s, received, tail_s, head)

    def _add_message(
        self,
        message: Message,
        start: float,
        left: float,
        received: float,
        tail: float,
        head: float | None = None,
    ) -> None:
        src, dst = message[:2]
        queue = self._under_way[_key(*message[:4])]
        label, handed_over = queue.popleft() if queue else ("", start)
        if not queue:
            del self._under_way[_key(*message[:4])]
        number = self._num_messages
        self._num_messages += 1
        # Rounding must not let it leave before it was handed over.
        start = max(start, handed_over)
        name = label or "message"
        spans = self.log.spans
        spans.append(Span(src, SEND, f"{name} to {dst}", start, left, number, handed_over))
        ready = received if head is None else head
        spans.append(Span(dst, RECEIVE, f"{name} from {src}", received, tail, number, ready))

    def _handed_over(self, message: Message) -> float:
        queue = self._under_way.get(_key(*message[:4]))
        return queue[0][1] if queue else 0.0

    def _add_layers(self, rank: int, begun: VirtualComputation) -> None:
        for is_backward, layer, start, end in begun.passes():
            way = "backward" if is_backward else "forward"
            name = f"{way} {self._layers[layer]}" if self._layers else "gradient"
            self.log.spans.append(Span(rank, COMPUTE, name, start, end))


def _key(src: int, dst: int, tag: Tag, data: Any) -> tuple[int, int, Tag, int]:
    return src, dst, tag, id(data)
