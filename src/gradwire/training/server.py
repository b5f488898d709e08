"""One server of a training run: it holds a shard of the model and runs the synchronization's rule.

It decodes what workers push, updates its shard with its part of the optimizer's state, and answers
with the shard. Compressed answers are changes relative to the worker's copy of the shard. The
server tracks each worker's copy by decoding its own answers, so the next answer contains what the
last one lost.

Workers are not trusted: a message that no worker may send is counted, warned of once and dropped.
Its sender gets an error as answer, and the server continues to serve the others.
"""

import warnings
from collections import Counter, deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, TypeVar

from torch import Tensor

from gradwire.core.codec import Codec, State
from gradwire.core.errors import GradwireWarning, PeerLost, WireError
from gradwire.core.group import mean_in_order
from gradwire.core.key import Key
from gradwire.core.node import Framed, Membership, Node
from gradwire.core.protocols import Event, Joined, Left, Pull, Push, TimedOut
from gradwire.core.ramp import at
from gradwire.core.spec import Spec
from gradwire.core.wire import HEADER_NBYTES, Failed, why_lost
from gradwire.training.optimizer import clipped_update
from gradwire.training.plan import Plan
from gradwire.training.pushes import PushAssembly
from gradwire.training.wire import (
    JOINING,
    AnswerHeader,
    PullHeader,
    PushHeader,
    answer_codec,
    answer_key,
    apply_change,
    tags_of,
)

T = TypeVar("T")
Noted = tuple[float, int, float]  # of all values of a name: sum, count, maximum


class TrainingServer:
    """Server number `number`; implements `core.protocols.Server`.

    `label`: of the model, where a node holds several.
    """

    def __init__(self, plan: Plan, number: int, label: str = "") -> None:
        self.plan = plan
        self.number = number
        self._tags = tags_of(label)
        shard = plan.shards()[number]
        self.params = plan.task.initial_params()[shard.start : shard.stop]
        self.optimizer: dict[str, Tensor] = plan.optimizer.init(self.params)
        self.memory: dict[str, Any] = {}
        self.members: frozenset[int] = frozenset(plan.layout.workers)
        self.notes: dict[str, Noted] = {}
        self.pushes: Counter[int] = Counter()  # by worker, with those of its earlier incarnations
        self.on_push: Callable[[int, int], None] | None = None  # called with rank and step
        self._node: Node | None = None
        self._layout = plan.layout
        self._pushes = PushAssembly(plan, number, self.params.dtype)
        self._events: deque[Event] = deque()  # not yet handed to the algorithm
        self._expected: set[int] = set()  # workers that joined, and will pull
        self._incarnations: dict[int, float] = {}  # incarnations of workers that joined later
        self._awaiting: set[int] = set()  # workers that wait for an answer
        self._orphaned: set[int] = set()  # workers that waited for one and are gone
        self._changed_s: dict[
            int, float
        ] = {}  # when the scheduler reported a worker's join or loss
        self._answers: dict[int, int] = {}  # how many each worker got so far
        # Each worker's copy of the shard, with compressed answers. All begin with the same model.
        self._shard_spec = plan.spec(shard, self.params.dtype)
        self._known = dict.fromkeys(plan.layout.workers, self.params)
        self._codec_states: dict[int, State] = {}
        self.refused: Counter[int] = Counter()  # invalid messages, by sender
        self._current_rank = -1  # the sender of the event that the algorithm handles
        self._is_new = True  # it has not run yet, nor been restored
        self._missed_changes = False  # of the membership, since the snapshot

    def begin_with(self, params: Tensor) -> None:
        """Before it runs: the shard as it is at the start, if the task does not know it."""
        self.params, self.optimizer = params, self.plan.optimizer.init(params)
        self._known = dict.fromkeys(self._layout.workers, params)

    @property
    def num_workers(self) -> int:
        return self.plan.num_workers

    @property
    def key(self) -> Key:
        return self.plan.key

    @property
    def num_examples(self) -> Sequence[int]:
        return self.plan.num_examples or (self.batch_size,) * self.num_workers

    @property
    def batch_size(self) -> int:
        return self.plan.batch_size

    @property
    def node(self) -> Node:
        assert self._node is not None
        return self._node

    def lr(self, step: int) -> float:
        return self.plan.lr(step)

    async def run(self, node: Node) -> None:
        """The program of the node. It may be closed while it waits, and run again."""
        self._node = node
        there = await node.members()
        if self._is_new:
            self.members = there
        elif self._missed_changes:
            # Workers that joined report it themselves.
            self._events.extend(Left(rank) for rank in sorted(self.members - there))
        self._is_new = self._missed_changes = False
        while True:
            try:
                await self.plan.synchronization.serve(self)
            except WireError as error:  # before anything has changed
                if self._current_rank < 0:
                    raise
                self._awaiting.discard(self._current_rank)
                await self._refuse(self._current_rank, error)

    async def now(self) -> float:
        return await self.node.now()

    async def lost(self, rank: int) -> PeerLost:
        return await why_lost(self.node, rank)

    async def event(self, timeout_s: float | None = None) -> Event:
        deadline = None if timeout_s is None else await self.now() + timeout_s
        while not self._events:
            request, _ = self._tags
            if deadline is None:
                rank, message = await self.node.recv_any(request)
            else:
                left = max(0.0, deadline - await self.now())
                got = await self.node.recv_within(request, left)
                if got is None:
                    return TimedOut()
                rank, message = got
            try:
                await self._add_events(rank, message)
            except WireError as error:
                await self._refuse(rank, error)
        event = self._events.popleft()
        self._current_rank = -1 if isinstance(event, TimedOut) else event.rank
        if isinstance(event, Joined):
            self.members |= {event.rank}
            self._forget(event.rank)
        elif isinstance(event, Left):
            self.members -= {event.rank}
            self._forget(event.rank)
        elif isinstance(event, Pull) or (isinstance(event, Push) and event.wants_answer):
            self._awaiting.add(event.rank)
        return event

    async def _add_events(self, rank: int, message: Any) -> None:
        """Adds the events of a message."""
        header = message.header if isinstance(message, Framed) else None
        is_worker = self._layout.is_worker(rank)
        match header:
            case Membership() if not is_worker and self._layout.is_worker(header.rank):
                self._change_membership(header)
            case PullHeader(step=step, life=life) if is_worker and step == JOINING:
                if self._join(rank, life):
                    self._events.append(Pull(rank, step))
            case PullHeader(step=step, life=life) if is_worker and step > JOINING:
                if self._accepts(rank, life):
                    self._events.append(Pull(rank, step))
            case PushHeader(life=life) if is_worker:
                if self._accepts(rank, life):
                    push = await self._pushes.add(self.node, rank, header, message.data)
                    if push is not None:
                        self._events.append(push)
                        self.pushes[rank] += 1
                        if self.on_push is not None:
                            self.on_push(rank, push.step)
            case _:
                what = repr(header) if isinstance(message, Framed) else type(message).__name__
                raise WireError(
                    f"rank {rank} sent {what:.200} to server {self.number}, expected a push or a "
                    "pull of a worker"
                )

    async def _refuse(self, rank: int, error: Exception) -> None:
        """Drops what a rank has begun to send, and answers it with the error."""
        self.refused[rank] += 1
        if self.refused[rank] == 1:
            text = f"{error}; it was dropped, and so is what else of that kind comes from this rank"
            warnings.warn(text, GradwireWarning, stacklevel=2)
        if self._layout.is_worker(rank):
            self._pushes.forget(rank)
            failed = Framed(Failed.of(error))
            await self.node.send_framed(rank, self._tags[1], failed, HEADER_NBYTES, "answer")

    def _change_membership(self, change: Membership) -> None:
        """The scheduler reports that a worker joined or left."""
        rank = change.rank
        self._changed_s[rank] = change.time_s
        if change.time_s <= self._incarnations.get(rank, -inf):
            return  # the worker's own message was faster
        self._expected.discard(rank)
        if change.there:
            self._expected.add(rank)
            self._events.append(Joined(rank))
        else:
            self._events.append(Left(rank))

    def _accepts(self, rank: int, life: float) -> bool:
        """Whether a message is accepted: not if that incarnation of the worker is lost."""
        now = self._incarnations.get(rank, 0.0)
        if not 0.0 <= life <= now:
            raise WireError(
                f"rank {rank} sent server {self.number} a message of its incarnation {life} s, but "
                "did not report that it joined then"
            )
        if life < now or rank not in self.members or rank in self._expected:
            return False
        if rank in self._awaiting:
            raise WireError(
                f"rank {rank} asks server {self.number} for something while it waits for an answer"
            )
        return True

    def _join(self, rank: int, life: float) -> bool:
        """A worker reports that it joined, perhaps before the scheduler does.

        False if it was lost again since then.
        """
        before = self._incarnations.get(rank, -inf)
        if not 0.0 <= life < inf or life <= before:
            raise WireError(
                f"rank {rank} reports to server {self.number} that it joined at {life} s, but it "
                f"joined at {before} s before"
            )
        changed_s = self._changed_s.get(rank, -inf)
        if life < changed_s:
            return False
        self._incarnations[rank] = life
        if rank in self._expected and life == changed_s:
            self._expected.remove(rank)
            return True
        self._expected.discard(rank)
        if rank in self.members:
            self._events.append(Left(rank))
        self._events.append(Joined(rank))
        return True

    def _forget(self, rank: int) -> None:
        """Drops the state of a worker: a new incarnation knows nothing of it."""
        self._pushes.forget(rank)
        self._awaiting.discard(rank)
        self._orphaned.discard(rank)
        self._known.pop(rank, None)
        self._codec_states.pop(rank, None)

    async def update(self, gradient: Tensor, step: int, lr_factor: float = 1.0) -> None:
        plan = self.plan
        rule = at(plan.optimizer, step, plan.steps_per_epoch)
        lr = plan.lr(step) * lr_factor
        self.params, self.optimizer = await self.node.call(
            clipped_update, rule, None, lr, self.params, gradient, self.optimizer
        )

    async def mean(self, vectors: Sequence[Tensor]) -> Tensor:
        return await self.node.call(mean_in_order, vectors, len(vectors))

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        return await self.node.call(function, *args)

    async def answer(
        self, rank: int, clock: int, *, accepted: bool = True, params: Tensor | None = None
    ) -> None:
        if rank in self._orphaned:
            self._orphaned.remove(rank)
            return
        if rank not in self._awaiting:  # its push asked for no answer
            return
        self._awaiting.remove(rank)
        params = self.params if params is None else params
        number = self._answers.get(rank, 0)
        self._answers[rank] = number + 1
        data, is_whole = params, True
        if self.plan.architecture.compresses_answers:
            known = self._known.get(rank)
            codec = answer_codec(self.plan.reducer, clock)
            is_exact = codec.guarantee(self._shard_spec).delta == 1.0
            if known is not None and not is_exact:
                key = answer_key(self.plan.key, number, rank, self.number)
                if rank not in self._codec_states:
                    self._codec_states[rank] = codec.init(self._shard_spec)
                state = self._codec_states[rank]
                data, known, self._codec_states[rank] = await self.node.call(
                    _encode_change, codec, params, known, self._shard_spec, state, key
                )
                is_whole = False
            self._known[rank] = params if is_whole or known is None else known
        header = AnswerHeader(clock, accepted, number, is_whole, self._incarnations.get(rank, 0.0))
        message = Framed(header, data)
        await self.node.send_framed(rank, self._tags[1], message, HEADER_NBYTES, "answer")

    def note(self, name: str, value: float) -> None:
        total, count, most = self.notes.get(name, (0, 0, value))
        self.notes[name] = total + value, count + 1, max(most, value)

    def snapshot(self) -> dict[str, Any]:
        """The whole state while the server waits for an event, as plain values."""
        assert not self._events, "a snapshot is taken while the server waits"
        return {
            "params": self.params,
            "optimizer": self.optimizer,
            "memory": self.memory,
            "notes": self.notes,
            "pushes": dict(self.pushes),
            "answers": self._answers,
            "known": self._known,
            "codec_states": self._codec_states,
            "lives": self._incarnations,
            "members": tuple(sorted(self.members)),
            "expected": tuple(sorted(self._expected)),
            "owed": tuple(sorted(self._awaiting)),
            "void": tuple(sorted(self._orphaned)),
            "news": self._changed_s,
            "begun": self._pushes.begun,
        }

    def restore(self, saved: dict[str, Any], *, is_replayed: bool = False) -> None:
        """Continues from a snapshot.

        `is_replayed`: a journal replays everything that happened since. Otherwise the server asks
        for the membership when it runs, and drops the workers that are not members.
        """
        self.params = saved["params"]
        self.optimizer = saved["optimizer"]
        self.memory = saved["memory"]
        self.notes = saved["notes"]
        self.pushes = Counter(saved["pushes"])
        self._answers = saved["answers"]
        self._known = saved["known"]
        self._codec_states = saved["codec_states"]
        self._incarnations = saved["lives"]
        self.members = frozenset(saved["members"])
        self._expected = set(saved["expected"])
        self._awaiting = set(saved["owed"])
        self._orphaned = set(saved["void"])
        self._changed_s = saved["news"]
        self._pushes.begun = saved["begun"]
        self._is_new, self._missed_changes = False, not is_replayed

    def forget_workers(self) -> None:
        """All workers are new ones, which will pull.

        Pushes that the old ones had begun are dropped. Synchronization may still answer the old
        ones until it gets their `Left`.
        """
        self.members = frozenset(self._layout.workers)
        self._events.clear()
        waited = self._awaiting | self._orphaned
        for rank in self._layout.workers:
            self._forget(rank)
        self._orphaned = waited
        self._incarnations.clear()
        self._changed_s.clear()
        self._expected.clear()

    def forget_figures(self) -> None:
        """Resets the counts and figures."""
        self.notes.clear()
        self.pushes.clear()


def _encode_change(
    codec: Codec, params: Tensor, known: Tensor, spec: Spec, state: State, key: Key
) -> tuple[Tensor, Tensor, State]:
    """The encoded change, the worker's copy after it, and the codec's new state."""
    payload, state = codec.encode(params - known, state, key)
    return payload.buffer, apply_change(codec, known, payload.buffer, spec, key), state
