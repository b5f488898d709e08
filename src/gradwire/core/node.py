"""Effects: the operations that an algorithm can ask of any engine.

An algorithm is an `async def` over a `Node`. Awaiting an effect hands it to the engine, which
answers it in virtual time (`runtime/virtual/engine.py`) or on real processes. Messages are tensors
that are not changed after sending. Algorithms never read a clock themselves.

    async def swap(node, x):
        other = 1 - node.rank
        await node.send(other, "swap", x)
        return await node.recv(other, "swap")
"""

from collections.abc import Callable, Coroutine, Generator, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import Tensor

from gradwire.core.exchange import Outgoing, Passed

T = TypeVar("T")
Tag = Hashable


class Effect(Generic[T]):
    """Something awaited; the engine's answer is the value of the `await`."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, Any, T]:
        answer: T = yield self
        return answer


class RunningProgram(Generic[T]):
    """A running program, as engines keep it."""

    __slots__ = ("done", "joiners", "priority", "program", "rank", "result", "waiting_for")

    def __init__(self, rank: int, program: Coroutine[Any, Any, T], priority: int = 0) -> None:
        self.rank = rank
        self.priority = priority  # of its messages
        self.program = program
        self.done = False
        self.result: Any = None
        self.waiting_for: Any = None  # the effect that has not been answered yet
        self.joiners: list[RunningProgram[Any]] = []


class Send(Effect[None]):
    """Hand a message to the network. Returns at once; the message leaves when the NIC is free."""

    __slots__ = ("data", "dst", "label", "nbytes", "tag")

    def __init__(self, dst: int, tag: Tag, data: Any, nbytes: int, label: str) -> None:
        self.dst = dst
        self.tag = tag
        self.data = data
        self.nbytes = nbytes
        self.label = label


class Recv(Effect[Tensor]):
    """Wait for the next message from one rank with this tag.

    Raises `PeerLost` where that rank is known to be gone and nothing of it is left to read.
    """

    __slots__ = ("src", "tag")

    def __init__(self, src: int, tag: Tag) -> None:
        self.src = src
        self.tag = tag


class RecvAny(Effect[T]):
    """Wait for the next message with this tag from any rank: (rank, message).

    After `timeout_s` seconds without one the answer is None; with 0 it does not wait at all.
    `is_gathering`: what the program does after a number of them does not depend on their order, so
    that it does the same on another network.
    """

    __slots__ = ("is_gathering", "tag", "timeout_s")

    def __init__(
        self, tag: Tag, timeout_s: float | None = None, is_gathering: bool = False
    ) -> None:
        self.tag = tag
        self.timeout_s = timeout_s
        self.is_gathering = is_gathering


class Watch(Effect[None]):
    """From now on, send this node each change of the membership, with this tag (`Membership`)."""

    __slots__ = ("tag",)

    def __init__(self, tag: Tag) -> None:
        self.tag = tag


class CurrentMembers(Effect[frozenset[int]]):
    """The ranks of the workers that are believed to be there."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Membership:
    """A change that `watch` delivers: a worker was lost, or came (back)."""

    rank: int
    there: bool
    time_s: float = field(default=0.0, compare=False)  # when that was noticed


@dataclass(frozen=True, slots=True)
class Framed:
    """A message with a header. Both are counted: a header of `header_nbytes` and the data."""

    header: Any  # a frozen dataclass of plain values
    data: Tensor | None = None


class Compute(Effect[T]):
    """A gradient (or other work of the task). Requests outstanding together run together."""

    __slots__ = ("request",)

    def __init__(self, request: Any) -> None:
        self.request = request


class Computation:
    """A gradient under way, layer by layer: what `begin` returns. Engines add to it."""

    __slots__ = ()


class Begin(Effect[Computation]):
    """Start to compute a gradient; the program does not wait.

    Unless it `is_open`, each layer waits for its `Open`, since its parameters are under way. On a
    node that `is_alone` they arrive in the memory of the request's parameters. `seconds`: how long
    it takes, where that is known (in a replay).
    """

    __slots__ = ("is_open", "request", "seconds")

    def __init__(self, request: Any, is_open: bool = True, seconds: float | None = None) -> None:
        self.request = request
        self.is_open = is_open
        self.seconds = seconds


class Open(Effect[None]):
    """The parameters of one layer are there, so its forward pass may start.

    The last of them brings the request with all parameters.
    """

    __slots__ = ("computation", "layer", "request")

    def __init__(self, computation: Computation, layer: int, request: Any = None) -> None:
        self.computation = computation
        self.layer = layer
        self.request = request


class Reach(Effect[T]):
    """Wait until the backward pass has left a layer: the result, with the gradient of this layer.

    Of layers that have not been reached the gradient is not there yet.
    """

    __slots__ = ("computation", "layer")

    def __init__(self, computation: Computation, layer: int) -> None:
        self.computation = computation
        self.layer = layer


class Call(Effect[T]):
    """Local work: a pure function. `shared`: other ranks call it on the same arguments."""

    __slots__ = ("args", "function", "shared")

    def __init__(self, function: Callable[..., T], args: tuple[Any, ...], shared: bool) -> None:
        self.function = function
        self.args = args
        self.shared = shared


class Collective(Effect[Tensor | None]):
    """The mean of all workers' vectors, by a collective of the transport.

    None: this engine has none, or not now; all ranks get the same answer. `sends` are the messages
    (receiver and bytes) that this rank would send otherwise: these are counted.
    """

    __slots__ = ("data", "label", "sends")

    def __init__(self, data: Tensor, sends: list[tuple[int, int]], label: str) -> None:
        self.data = data
        self.sends = sends
        self.label = label


class Exchange(Effect[Sequence[Tensor] | None]):
    """Messages between every two members of a group: those that come for this one, by sender.

    None: this engine has no such effect, or not now, and the messages are sent one by one; all
    members get the same answer. Times and bytes are those of messages one by one, in the order of
    `Group.all_to_all`.
    """

    __slots__ = ("label", "members", "outgoing", "rank", "tag")

    def __init__(
        self, members: tuple[int, ...], rank: int, tag: Tag, outgoing: Outgoing, label: str
    ) -> None:
        self.members = members
        self.rank = rank  # among them
        self.tag = tag
        self.outgoing = outgoing
        self.label = label


class Pass(Effect[T | None]):
    """Messages around a ring of members: what this one has when each has been everywhere.

    In n - 1 turns a member sends number (first - turn) % n to its right neighbour and receives the
    one before from its left; if that `is_added`, it calls `torch.add`, and passes on the sum.
    `seconds`: how long a call for its first message takes, where that is known (in a replay).
    None: as for an `Exchange`.
    """

    __slots__ = ("first", "label", "members", "outgoing", "rank", "seconds", "tag")

    def __init__(
        self,
        members: tuple[int, ...],
        rank: int,
        tag: Tag,
        first: int,
        outgoing: Passed[T],
        label: str,
        seconds: float | None = None,
    ) -> None:
        self.members = members
        self.rank = rank  # among them
        self.tag = tag
        self.first = first  # number of the message that it starts with
        self.outgoing = outgoing
        self.label = label
        self.seconds = seconds


class Now(Effect[float]):
    """The time, in seconds."""

    __slots__ = ()


class Sleep(Effect[None]):
    __slots__ = ("seconds",)

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


class Spawn(Effect[RunningProgram[T]]):
    """Start a second program on this node; it shares the node's NIC and clock.

    Where messages wait for the NIC, those of programs of a higher priority leave first.
    """

    __slots__ = ("priority", "program")

    def __init__(self, program: Coroutine[Any, Any, T], priority: int = 0) -> None:
        self.program = program
        self.priority = priority


class Join(Effect[T]):
    """Wait for a spawned program and take its result."""

    __slots__ = ("task",)

    def __init__(self, task: RunningProgram[T]) -> None:
        self.task = task


class Node:
    """One participant: its rank, and its effects.

    `size` is the number of workers, whose ranks are 0 .. size - 1. Nodes with other roles (servers,
    a scheduler) have the ranks after them. `native`: the engine may answer a `Collective`; if it
    is False, programs need not ask. `is_alone`: it has its process to itself, so that results that
    are only shared in the simulator may be written into memory of its own.
    """

    __slots__ = ("is_alone", "native", "rank", "size")

    def __init__(self, rank: int, size: int, native: bool = False, is_alone: bool = False) -> None:
        self.rank = rank
        self.size = size
        self.native = native
        self.is_alone = is_alone

    def send(self, dst: int, tag: Tag, data: Tensor, label: str = "") -> Send:
        """`label` names the tensor in the byte ledger."""
        return Send(dst, tag, data, data.numel() * data.element_size(), label)

    def send_framed(
        self, dst: int, tag: Tag, message: Framed, header_nbytes: int, label: str = ""
    ) -> Send:
        """A message with a header of so many bytes; the receiver gets the `Framed`."""
        data = message.data
        nbytes = 0 if data is None else data.numel() * data.element_size()
        return Send(dst, tag, message, header_nbytes + nbytes, label)

    def recv(self, src: int, tag: Tag) -> Recv:
        return Recv(src, tag)

    def recv_any(self, tag: Tag) -> RecvAny[tuple[int, Any]]:
        return RecvAny(tag)

    def recv_each(self, tag: Tag) -> RecvAny[tuple[int, Any]]:
        """Like `recv_any`, to gather messages whose order does not matter."""
        return RecvAny(tag, is_gathering=True)

    def recv_within(self, tag: Tag, seconds: float) -> RecvAny[tuple[int, Any] | None]:
        """Like `recv_any`, but None if nothing comes in time."""
        return RecvAny(tag, seconds)

    def watch(self, tag: Tag) -> Watch:
        return Watch(tag)

    def members(self) -> CurrentMembers:
        return CurrentMembers()

    def compute(self, request: Any) -> Compute[Any]:
        return Compute(request)

    def begin(self, request: Any, *, is_open: bool = True) -> Begin:
        """Starts a gradient, or lets its layers wait to be opened."""
        return Begin(request, is_open)

    def open(self, computation: Computation, layer: int, request: Any = None) -> Open:
        return Open(computation, layer, request)

    def reach(self, computation: Computation, layer: int) -> Reach[Any]:
        return Reach(computation, layer)

    def call(self, function: Callable[..., T], *args: Any) -> Call[T]:
        """Work that only this rank does (encoding its own gradient)."""
        return Call(function, args, shared=False)

    def share(self, function: Callable[..., T], *args: Any) -> Call[T]:
        """Work that every rank does on the same objects (averaging what all have received).

        The result must be treated as immutable: the simulator computes it once and hands the
        same object to every rank. Tensors count as the same only if they are the same object.
        """
        return Call(function, args, shared=True)

    def native_mean(self, x: Tensor, sends: list[tuple[int, int]], label: str = "") -> Collective:
        """The mean of a vector over all workers, if the engine has a collective for it."""
        return Collective(x, sends, label)

    def exchange(
        self, members: tuple[int, ...], rank: int, tag: Tag, outgoing: Outgoing, label: str = ""
    ) -> Exchange:
        """The messages of an exchange as one effect, if the engine has it."""
        return Exchange(members, rank, tag, outgoing, label)

    def now(self) -> Now:
        return Now()

    def sleep(self, seconds: float) -> Sleep:
        return Sleep(seconds)

    def spawn(self, program: Coroutine[Any, Any, T], priority: int = 0) -> Spawn[T]:
        return Spawn(program, priority)

    def join(self, task: RunningProgram[T]) -> Join[T]:
        return Join(task)
