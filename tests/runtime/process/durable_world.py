"""A server that crashes and workers that do not, in one thread and without a clock.

The workers run their real programs. They live in a `World`, which survives the server: it has their
ends of the links, with what is not acknowledged. `Inner` is the server's end, which does not. When
it is asked for what arrived and has nothing, the world goes on: workers get what was sent to them
and run until they wait. So the same things happen in the same order in every run.
"""

from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch

from gradwire.core.node import (
    Call,
    Compute,
    CurrentMembers,
    Framed,
    Membership,
    Node,
    Now,
    Recv,
    Send,
)
from gradwire.core.wire import REQUEST
from gradwire.experiment.processes.headers import HEADERS
from gradwire.runtime.durable import checkpoint, journal
from gradwire.runtime.durable.checkpoint import Store
from gradwire.runtime.durable.transport import DurableTransport, links_of
from gradwire.runtime.process.engine import ProcessEngine
from gradwire.runtime.process.frames import tag_hash
from gradwire.runtime.process.transport import ARRIVED, DONE, JOINED, LOST, Arrival, LinkCounts
from gradwire.training import program
from gradwire.training.plan import Plan
from gradwire.training.server import TrainingServer


class Crash(BaseException):
    """kill -9."""


class Fuse:
    """Ends the process before its operation number `limit`, counted from 0."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.names: list[str] = []

    def __call__(self, name: str) -> None:
        if self.limit is not None and len(self.names) >= self.limit:
            raise Crash(name)
        self.names.append(name)


class Peer:
    """The end of a link at a worker or the scheduler; it numbers, keeps and takes once."""

    def __init__(self, rank: int, life: float = 0.0) -> None:
        self.rank, self.life = rank, life
        self.num_sent = self.num_acknowledged = self.num_received = 0
        self.kept: deque[tuple[int, Arrival]] = deque()  # with a number of all in the world
        self.inbox: dict[tuple[int, int], deque[Any]] = {}

    def post(self, order: int, arrival: Arrival) -> None:
        self.num_sent += 1
        self.kept.append((order, arrival._replace(number=self.num_sent)))

    def acknowledged(self, number: int) -> None:
        assert self.num_acknowledged <= number <= self.num_sent
        self.num_acknowledged = number
        while self.kept and self.kept[0][1].number <= number:
            self.kept.popleft()


class Worker(Peer):
    """Runs its program when it can."""

    def __init__(self, rank: int, life: float, run: Coroutine[Any, Any, Any]) -> None:
        super().__init__(rank, life)
        self.run = run
        self.waits: Recv | None = None
        self.has_begun = self.is_done = False
        self.result: Any = None


class World:
    """All but the server, whose rank is n; that of the scheduler is n + 1."""

    def __init__(
        self, plan: Plan, dies: dict[int, int], returns: dict[int, int], absent: tuple[int, ...]
    ) -> None:
        self.plan = plan
        self.num_workers = plan.num_workers
        self.server = plan.num_workers
        self.dies = dict(dies)  # rank -> before its step
        self.returns = dict(returns)  # rank -> when rank 0 has done so many steps
        self.steps = [0] * plan.num_workers
        self.num_sent = 0
        self.clock = 0.0
        self.scheduler = Peer(plan.num_workers + 1)
        self.inner: Inner | None = None
        self.lost: dict[int, float] = {}
        self.workers: dict[int, Worker] = {}
        for rank in range(plan.num_workers):
            if rank not in absent:
                node = Node(rank, plan.num_workers)
                replica = plan.initial_replicas()[rank]
                run = program.train(plan, node, replica, 0, plan.num_steps, self)
                self.workers[rank] = Worker(rank, 0.0, run)
        self.absent = absent

    def worker_started(self, worker: Any) -> None:
        pass

    def step_finished(self, rank: int, step: int, replica: Any, now: float) -> None:
        self.steps[rank] = step + 1

    @property
    def peers(self) -> list[Peer]:
        return [*self.workers.values(), self.scheduler]

    def go_on(self) -> bool:
        """Workers get what was sent and run until they wait; whether something happened."""
        assert self.inner is not None
        happened = self.inner.deliver()
        for rank in sorted(self.workers):
            worker = self.workers.get(rank)
            if worker is None or worker.is_done:
                continue
            if self.dies.get(rank, -1) == self.steps[rank]:
                self._lose(worker)
                happened = True
            elif self._run(worker):
                happened = True
        for rank, steps in list(self.returns.items()):
            if rank in self.lost and self.steps[0] >= steps:
                del self.returns[rank]
                self._return(rank)
                happened = True
        if not happened and self.absent and all(w.is_done for w in self.workers.values()):
            self._tell(self.absent[0], False)
            self.absent = self.absent[1:]
            return True
        return happened

    def post(self, peer: Peer, arrival: Arrival) -> None:
        self.num_sent += 1
        peer.post(self.num_sent, arrival)
        assert self.inner is not None
        self.inner.receive(peer)

    def _lose(self, worker: Worker) -> None:
        rank = worker.rank
        del self.dies[rank]
        worker.run.close()
        del self.workers[rank]
        self._tell(rank, False)

    def _return(self, rank: int) -> None:
        self._tell(rank, True)
        run = program.rejoin(
            self.plan, Node(rank, self.num_workers), self.plan.num_steps, self, self.clock
        )
        self.workers[rank] = Worker(rank, self.clock, run)

    def _tell(self, rank: int, is_there: bool) -> None:
        self.clock += 1.0
        assert self.inner is not None
        if is_there:
            del self.lost[rank]
            arrival = Arrival(JOINED, rank, time_s=self.clock)
        else:
            self.lost[rank] = self.clock
            arrival = Arrival(LOST, rank, message="it died", time_s=self.clock)
        self.inner.happen(arrival)
        news = Framed(Membership(rank, is_there, self.clock))
        message = Arrival(ARRIVED, self.scheduler.rank, 0, tag_hash(REQUEST), news)
        self.post(self.scheduler, message)

    def _run(self, worker: Worker) -> bool:
        value: Any = None
        if worker.waits is not None:
            box = worker.inbox.get((worker.waits.src, tag_hash(worker.waits.tag)))
            if not box:
                return False
            value = box.popleft()
        worker.waits = None
        while True:
            try:
                effect = worker.run.send(value)
            except StopIteration as end:
                worker.is_done, worker.result = True, end.value
                self.post(worker, Arrival(DONE, worker.rank, 0, 1))
                return True
            value = None
            match effect:
                case Send():
                    assert effect.dst == self.server
                    tag = tag_hash(effect.tag)
                    self.post(worker, Arrival(ARRIVED, worker.rank, 0, tag, effect.data))
                case Recv():
                    box = worker.inbox.get((effect.src, tag_hash(effect.tag)))
                    if not box:
                        worker.waits = effect
                        return True
                    value = box.popleft()
                case Call():
                    value = effect.function(*effect.args)
                case Compute():
                    (value,) = self.plan.task.gradients([effect.request])
                case Now():
                    value = self.clock
                case CurrentMembers():
                    value = frozenset(self.workers)
                case _:
                    raise AssertionError(effect)


class Inner:
    """The server's end of all links, as `NumberedTransport` has it."""

    def __init__(self, world: World, links: LinkCounts, fuse: Fuse) -> None:
        self.rank, self.size = world.server, world.num_workers + 2
        self.world, self.fuse = world, fuse
        self.before = links
        self.arrivals: deque[tuple[Peer | None, Arrival]] = deque()
        self.taken: dict[Peer, int] = {}
        self.handed: dict[Peer, int] = {}
        self.cleared: dict[Peer, int] = {}
        self.posted: dict[Peer, int] = {}
        self.outbox: list[tuple[Peer, int, int, Any]] = []  # peer, number, tag, message
        world.inner = self
        for rank, time_s in world.lost.items():
            self.happen(Arrival(LOST, rank, message="it was lost before", time_s=time_s))
        for worker in world.workers.values():
            if worker.life:
                self.happen(Arrival(JOINED, worker.rank, time_s=worker.life))
        for peer in world.peers:
            self._meet(peer)
        again = sorted((order, i) for i, p in enumerate(world.peers) for order, _ in p.kept)
        for _, i in again:  # in the order in which they were sent at first
            self.receive(world.peers[i], at_most=1)

    def _meet(self, peer: Peer) -> None:
        life, received, sent = self.before.get(peer.rank, (peer.life, 0, 0))
        if life != peer.life:
            received = sent = 0
        assert peer.num_acknowledged <= received <= peer.num_sent, "what was acknowledged is lost"
        assert sent <= peer.num_received, "what was sent is lost"
        self.taken[peer] = self.handed[peer] = self.cleared[peer] = received
        self.posted[peer] = sent
        peer.acknowledged(received)

    def happen(self, arrival: Arrival) -> None:
        self.arrivals.append((None, arrival))

    def receive(self, peer: Peer, at_most: int = 1 << 30) -> None:
        if peer not in self.taken:
            self._meet(peer)
        for _, arrival in peer.kept:
            if arrival.number == self.taken[peer] + 1 and at_most:
                self.taken[peer] += 1
                at_most -= 1
                self.arrivals.append((peer, arrival))

    def deliver(self) -> bool:
        """What was sent arrives, each once."""
        outbox, self.outbox = self.outbox, []
        for peer, number, tag, message in outbox:
            if peer in self.world.peers and number == peer.num_received + 1:
                peer.num_received += 1
                peer.inbox.setdefault((self.rank, tag), deque()).append(message)
        return bool(outbox)

    # Transport.

    def send(self, dst: int, job: int, tag: int, message: Any) -> None:
        self.fuse("send")
        for peer in self.taken:
            if peer.rank == dst and self._is_there(peer):
                self.posted[peer] += 1
                self.outbox.append((peer, self.posted[peer], tag, message))

    def _is_there(self, peer: Peer) -> bool:
        return peer in self.world.peers

    def send_done(self, dst: int, job: int, number: int) -> None:
        raise AssertionError

    def next(self, timeout_s: float | None) -> Arrival | None:
        if not self.arrivals and timeout_s != 0:
            while not self.arrivals and self.world.go_on():
                pass
        if not self.arrivals:
            return None
        self.fuse("take")
        peer, arrival = self.arrivals.popleft()
        if peer is not None:
            self.handed[peer] = arrival.number
        return arrival

    def defer(self, arrival: Arrival) -> None:
        raise AssertionError

    def deferred(self, job: int) -> list[Arrival]:
        raise AssertionError

    def acknowledge(self, src: int, number: int) -> None:
        self.fuse("acknowledge")
        for peer in self.taken:
            if peer.rank == src and self._is_there(peer):
                assert number <= self.handed[peer]
                self.cleared[peer] = number
                peer.acknowledged(number)

    def links(self) -> LinkCounts:
        return {
            peer.rank: (peer.life, self.cleared[peer], self.posted[peer])
            for peer in self.taken
            if self._is_there(peer)
        }

    def outstanding(self) -> dict[int, int]:
        return {
            peer.rank: max(0, self.posted[peer] - peer.num_received)
            for peer in self.taken
            if self._is_there(peer)
        }


class Outcome:
    """How it ended."""

    def __init__(self, world: World, state: dict[str, Any], server: Any, num_starts: int) -> None:
        self.num_starts = num_starts
        self.params = {rank: worker.result.params for rank, worker in world.workers.items()}
        self.state = state
        self.server = server


def run(
    plan: Plan,
    folder: Path,
    monkeypatch: Any,
    *,
    limits: tuple[int, ...] = (),  # where the first, second, ... server crashes
    is_durable: bool = True,
    max_nbytes: int = 4000,
    dies: dict[int, int] | None = None,
    returns: dict[int, int] | None = None,
    absent: tuple[int, ...] = (),
    after: Callable[[Path, dict[str, int]], None] = lambda folder, synced: None,
) -> tuple[Outcome, list[str]]:
    """Runs to the end, with servers that crash; and what the last one did.

    `after` may do to the folder what the end of the machine does: it gets the synced sizes.
    """
    world = World(plan, dies or {}, returns or {}, absent)
    num_starts, synced = 0, {}
    while True:
        fuse = Fuse(limits[num_starts] if num_starts < len(limits) else None)
        num_starts += 1
        assert num_starts <= len(limits) + 1
        with monkeypatch.context() as patch:
            _with_fuse(patch, fuse, synced)
            server = _Server(plan, folder, world, fuse, is_durable, max_nbytes)
            try:
                server.start()
                server.run()
                state = server.snapshot()
                server.close()
            except Crash:
                server.kill()
                after(folder, synced)
                continue
        return Outcome(world, state, server.server, num_starts), fuse.names


class _Server:
    def __init__(
        self, plan: Plan, folder: Path, world: World, fuse: Fuse, is_durable: bool, max_nbytes: int
    ) -> None:
        self.plan, self.folder, self.world, self.fuse = plan, folder, world, fuse
        self.is_durable, self.max_nbytes = is_durable, max_nbytes
        self.holds_model = plan.ability == "push_pull"
        self.server: Any = TrainingServer(plan, 0) if self.holds_model else None
        self.keep: dict[str, Any] = {}
        self.store: Store | None = None
        self.engine: ProcessEngine | None = None

    def start(self) -> None:
        self.store = Store(self.folder, "job")
        if self.store.state is not None:
            if self.holds_model:
                self.server.restore(self.store.state["state"], is_replayed=True)
            else:
                self.keep = self.store.state["state"]
        inner = Inner(self.world, links_of(self.store), self.fuse)
        self.transport = DurableTransport(
            inner,
            self.store,
            self.snapshot,
            headers=HEADERS,
            is_durable=self.is_durable,
            checkpoint_every_s=3600,
            max_journal_nbytes=self.max_nbytes,
            max_unacknowledged_nbytes=self.max_nbytes,
        )
        self.engine = ProcessEngine(self.transport, self.plan.num_workers, timeout_s=2)

    def snapshot(self) -> Any:
        if self.engine is None or not self.engine.is_at_rest:
            return None
        return self.server.snapshot() if self.holds_model else self.keep

    def run(self) -> None:
        assert self.engine is not None
        self.engine.run(lambda node: self.transport.recorded(self._program(node)))

    def _program(self, node: Node) -> Any:
        if self.holds_model:
            return self.server.run(node)
        return self.plan.architecture.daemon(node, self.keep)

    def kill(self) -> None:
        if self.store is not None:
            self.store.close()

    def close(self) -> None:
        self.transport.close()


def _with_fuse(patch: Any, fuse: Fuse, synced: dict[str, int]) -> None:
    real_write, real_rename = journal.write, checkpoint.rename
    real_remove, real_next = checkpoint.remove, DurableTransport.next

    def write(handle: int, pieces: list[Any]) -> None:
        try:
            fuse("write")
        except Crash:
            whole = b"".join(map(bytes, pieces))
            real_write(handle, [whole[: len(whole) // 2]])
            raise
        real_write(handle, pieces)

    def sync(handle: int) -> None:
        fuse("sync")  # and nothing more: that takes time
        path = Path(f"/proc/self/fd/{handle}")
        synced[path.readlink().name] = path.stat().st_size

    def sync_folder(folder: Path) -> None:
        fuse("sync folder")

    def rename(source: Path, target: Path) -> None:
        fuse("rename")
        real_rename(source, target)

    def remove(path: Path) -> None:
        fuse("remove")
        real_remove(path)

    def hand_over(self: DurableTransport, timeout_s: float | None) -> Arrival | None:
        arrival = real_next(self, timeout_s)
        if arrival is not None:
            fuse("hand over")
        return arrival

    patch.setattr(journal, "write", write)
    patch.setattr(journal, "sync", sync)
    patch.setattr(journal, "sync_folder", sync_folder)
    patch.setattr(checkpoint, "rename", rename)
    patch.setattr(checkpoint, "remove", remove)
    patch.setattr(DurableTransport, "next", hand_over)


def same(one: Any, other: Any) -> bool:
    """Whether two trees of plain values and tensors are equal to the last bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
