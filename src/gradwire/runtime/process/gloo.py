"""Messages between processes by torch.distributed's point-to-point operations on gloo.

What is particular to gloo: a receive cannot be polled, so one thread per peer blocks in it. A wait
that expires breaks the connection for good, so the group is one of our own whose timeout is a
year. A receive takes a message that is shorter than its buffer, but aborts the process if more
comes. So a block of limited length comes first, and says how long the payload is that follows. A
receive for that is posted already unless it is the longest so far: see expected.py. A peer that was
killed shows as an error of the receive that waits for it.

Sends are posted at once and in order (posted_sends.py). What has been received and not taken is
limited, too (unread_limit.py).

Tensors on accelerators: see accelerator.py. Means by gloo's own all-reduce: see native_means.py.
"""

import threading
from collections import defaultdict, deque
from datetime import timedelta
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire import kernels
from gradwire.core.errors import WireError
from gradwire.runtime.process import frames
from gradwire.runtime.process.accelerator import (
    CopiedArrival,
    DeviceCopy,
    HostCopy,
    Outgoing,
    PayloadGroups,
)
from gradwire.runtime.process.expected import ExpectedLength, PayloadReceiver
from gradwire.runtime.process.frames import Headers, Packed
from gradwire.runtime.process.group_means import FinishedMean, GroupMeans
from gradwire.runtime.process.posted_sends import PostedSends
from gradwire.runtime.process.transport import (
    ARRIVED,
    DONE,
    GOODBYE,
    LOST,
    WOKEN,
    Arrival,
    message_nbytes,
    tensor_of,
)
from gradwire.runtime.process.unread_limit import UnreadLimit

_NEVER = timedelta(days=365)
# A payload that follows its block costs a second exchange between the ranks; up to here a copy is
# cheaper. There is one such buffer per peer.
BLOCK_NBYTES = 1 << 19
_NO_BYTES = torch.empty(0, dtype=torch.uint8)
_NO_HEADERS = Headers()


def _new_group(timeout: timedelta, ranks: list[int] | None) -> dist.ProcessGroup:
    """A process group on gloo; only its members make it."""
    is_local = ranks is not None
    group = dist.new_group(ranks, timeout, "gloo", use_local_synchronization=is_local)
    assert isinstance(group, dist.ProcessGroup), "this rank is not in the group"
    return group


class GlooTransport:
    """The transport of one rank. All ranks of the default process group make theirs together, or
    some `ranks` of it; `rank` and `size` count among them.

    `group` is used as it is if given: its timeout must be longer than any rank is ever silent.
    Tensors that lay on an accelerator are moved to `device` on arrival. Through `payloads` they go
    from one accelerator to the other.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        headers: Headers = _NO_HEADERS,
        max_bytes_posted: int = 64 << 20,  # to one peer
        max_payload_nbytes: int = frames.MAX_PAYLOAD_NBYTES,
        send_s: float = 300.0,  # how long a peer may read nothing before it counts as lost
        close_s: float = 10.0,  # how long to wait for the others' goodbyes
        device: torch.device | None = None,
        max_bytes_unread: int = 64 << 20,  # of one peer
        payloads: PayloadGroups | None = None,
        ranks: list[int] | None = None,
        adds_halves: bool = False,  # native means of float16, in its own precision
    ) -> None:
        made = _new_group(_NEVER, ranks) if group is None else group
        self._group = made
        self.rank, self.size = made.rank(), made.size()
        self.headers = headers
        self._max_payload_nbytes = max_payload_nbytes
        self._close_s = close_s
        self._device = device
        self._payloads = payloads
        # The engine and the receiving threads share the groups of payloads. The first send between
        # two ranks waits for the other to receive. With a lock for each direction ranks wait only
        # for higher ranks, or only for lower ones, so there is no deadlock.
        self._payload_locks = {id(one): threading.Lock() for one in (payloads or ())[:2]}
        self._host_copy_stream: torch.cuda.Stream | None = None
        self._device_copy_stream: torch.cuda.Stream | None = None
        if device is not None and device.type == "cuda":
            self._host_copy_stream = torch.cuda.Stream(device)
            self._device_copy_stream = torch.cuda.Stream(device)
        self._outgoing: deque[Outgoing] = deque()
        # What was packed last: the next peer often gets the same.
        self._last: tuple[Any, tuple[int, int], Packed] | None = None
        self._arrivals: SimpleQueue[Arrival | CopiedArrival | FinishedMean] = SimpleQueue()
        self._unread = UnreadLimit(self.size, max_bytes_unread)
        self.num_bytes_received = 0  # with frames
        self._counting = threading.Lock()
        self._deferred: defaultdict[int, list[Arrival]] = defaultdict(list)
        self._ended: list[Arrival] = []  # peers that left or were lost
        send_timeout = timedelta(seconds=send_s)
        self._sends = PostedSends(
            self.size, max_bytes_posted, send_timeout, self._unread.set_sending
        )
        reducing = _new_group(send_timeout, ranks) if group is None else None
        device_group = None if payloads is None else payloads.up
        self._means = GroupMeans(
            reducing, device_group, self.rank, self.size, self._arrivals.put, adds_halves
        )
        self._expected = [ExpectedLength() for _ in range(self.size)]  # by each peer, from this one
        self._payloads_from = [
            PayloadReceiver(made, peer, self._empty) for peer in range(self.size)
        ]
        self._is_closed = False
        self._receivers = [
            threading.Thread(
                target=self._receive, args=(peer,), name=f"gradwire-recv-{peer}", daemon=True
            )
            for peer in range(self.size)
            if peer != self.rank
        ]
        for receiver in self._receivers:
            receiver.start()

    def send(self, dst: int, job: int, tag: int, message: Any) -> None:
        if dst == self.rank:
            self._arrivals.put(Arrival(ARRIVED, dst, job, tag, message))
            return
        data, payloads = tensor_of(message), self._payloads
        is_direct = (
            payloads is not None and data is not None and data.device.type == payloads.device_type
        )
        if data is not None and self._needs_copy(data) and not is_direct:
            self._outgoing.append(Outgoing(dst, job, tag, message, self._copy_to_host(data)))
        elif self._outgoing and not is_direct:
            self._outgoing.append(Outgoing(dst, job, tag, message, None))
        else:
            self._flush()
            self._post(dst, self._pack(job, tag, message, is_direct=is_direct))

    @property
    def num_bytes_sent(self) -> int:
        """With frames; without what native means send, which gloo does not report."""
        return self._sends.num_bytes

    @property
    def num_native_means(self) -> int:
        return self._means.num_started

    def native_mean(self, x: Tensor) -> int | None:
        """Starts an all-reduce and returns its number. None: not possible for such tensors."""
        return self._means.start(x)

    def wake(self) -> None:
        """Lets `next` return. Any thread may call it."""
        self._arrivals.put(Arrival(WOKEN, self.rank))

    def send_done(self, dst: int, job: int, number: int) -> None:
        self._flush()
        self._post(dst, frames.pack_control(frames.DONE, job, number))

    def next(self, timeout_s: float | None) -> Arrival | None:
        self._flush()
        self._last = None
        try:
            if timeout_s == 0:
                came = self._arrivals.get_nowait()
            else:
                came = self._arrivals.get(timeout=timeout_s)
        except Empty:
            return None
        if isinstance(came, FinishedMean):
            return came.arrival(self.rank)
        if isinstance(came, CopiedArrival):
            came.copy.wait()
            came = came.arrival
        if came.kind == ARRIVED and came.src != self.rank:
            self._unread.take(came.src, message_nbytes(came.message))
        elif came.kind in (LOST, GOODBYE):
            self._ended.append(came)
        return came

    def _needs_copy(self, data: Tensor) -> bool:
        return data.is_cuda

    def _copy_to_host(self, data: Tensor) -> HostCopy:
        last = self._outgoing[-1].copy if self._outgoing else None
        if last is not None and last.tensor is data:  # the same to several peers
            return last
        if self._host_copy_stream is None:
            self._host_copy_stream = torch.cuda.Stream(data.device)
        return HostCopy(data, self._host_copy_stream)

    def _flush(self) -> None:
        """Posts messages that wait for their copies from the accelerator."""
        while self._outgoing:
            dst, job, tag, message, copy = self._outgoing.popleft()
            copied = None if copy is None else copy.wait()
            self._post(dst, self._pack(job, tag, message, copied=copied))

    def _pack(
        self,
        job: int,
        tag: int,
        message: Any,
        copied: Tensor | None = None,
        is_direct: bool = False,
    ) -> Packed:
        if self._last is not None:
            sent, sent_as, packed = self._last
            if sent is message and sent_as == (job, tag):
                return packed
        packed = frames.pack(
            job,
            tag,
            message,
            self.headers,
            BLOCK_NBYTES,
            inline_nbytes=BLOCK_NBYTES,
            copied=copied,
            is_direct=is_direct,
        )
        self._last = message, (job, tag), packed
        return packed

    def defer(self, arrival: Arrival) -> None:
        self._deferred[arrival.job].append(arrival)

    def deferred(self, job: int) -> list[Arrival]:
        for other in [other for other in self._deferred if other < job]:
            del self._deferred[other]
        return self._deferred.pop(job, []) + self._ended

    def close(self, lost: int | None = None) -> None:
        """Says goodbye, and waits up to `close_s` until what was sent has left and all others have
        said goodbye, too. Nothing can be sent or received afterwards.

        `lost` is the rank without which this one cannot continue, if that is why it leaves. Others
        that wait for this one then name the rank that was lost, not this one.
        """
        if self._is_closed:
            return
        self._flush()
        self._is_closed = True
        self._unread.close()
        for peer in range(self.size):
            if peer != self.rank:
                number = 0 if lost is None else lost + 1
                self._post(peer, frames.pack_control(frames.GOODBYE, 0, number))
        until = monotonic() + self._close_s
        for receiver in self._receivers:
            receiver.join(max(0.0, until - monotonic()))
        # A peer that said goodbye has read, or will read, all that was sent to it before.
        self._sends.wait_all(until)
        if lost is not None:
            self._means.abort()

    def _post(self, peer: int, packed: Packed) -> None:
        block, payload = packed.block, packed.payload
        self._sends.post(peer, block, lambda: self._group.send([block], peer, 0))
        if payload is not None:
            self._sends.post(peer, payload, lambda: self._send_payload(peer, payload, packed))

    def _payload_group(self, src: int, dst: int) -> dist.ProcessGroup:
        assert self._payloads is not None
        return self._payloads.up if src < dst else self._payloads.down

    def _send_payload(self, peer: int, payload: Tensor, packed: Packed) -> dist.Work:
        if not packed.is_direct:
            return self._group.send([payload], peer, self._expected[peer].next_tag(payload.numel()))
        group = self._payload_group(self.rank, peer)
        with self._payload_locks[id(group)]:
            return group.send([payload], peer, 0)

    def _receive(self, peer: int) -> None:
        """Runs in a thread of its own."""
        block = torch.empty(BLOCK_NBYTES, dtype=torch.uint8)
        view = block.numpy().data
        try:
            while True:
                self._group.recv([block], peer, 0).wait()
                frame = frames.unpack(
                    view,
                    self.headers,
                    self._max_payload_nbytes,
                    block_nbytes=BLOCK_NBYTES,
                    inline_nbytes=BLOCK_NBYTES,
                )
                with self._counting:
                    self.num_bytes_received += frame.total_nbytes
                if frame.kind == frames.GOODBYE:
                    if frame.tag > self.size:
                        raise WireError(f"it lost rank {frame.tag - 1} of {self.size}")
                    self._arrivals.put(Arrival(GOODBYE, peer, tag=frame.tag))
                    return
                if frame.kind == frames.DONE:
                    self._arrivals.put(Arrival(DONE, peer, frame.job, frame.tag))
                    continue
                message, copy = self._message(peer, frame, block)
                if self._is_closed:
                    continue
                arrival = Arrival(ARRIVED, peer, frame.job, frame.tag, message, monotonic())
                self._unread.add(peer, message_nbytes(message))
                self._arrivals.put(arrival if copy is None else CopiedArrival(arrival, copy))
                self._unread.wait_for_room(peer)
        except WireError as error:
            # The start of the next block is not known any more.
            self._arrivals.put(Arrival(LOST, peer, message=f"it sent what is no message: {error}"))
        except Exception as error:  # or the error would be lost with the thread
            first = (str(error).splitlines() or [type(error).__name__])[0]
            self._arrivals.put(Arrival(LOST, peer, message=first))

    def _message(
        self, peer: int, frame: frames.Frame, block: Tensor
    ) -> tuple[Any, DeviceCopy | None]:
        """The message, and its copy to the accelerator if the tensor lay on one."""
        stream = self._device_copy_stream
        if not frame.on_device or stream is None:
            return frame.message(self._payload(peer, frame, block)), None
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            payload = self._payload(peer, frame, block)
            message = frame.message(payload.to(self._device, non_blocking=True))
            data = tensor_of(message)
            assert data is not None
            return message, DeviceCopy(data, stream)

    def _payload(self, peer: int, frame: frames.Frame, block: Tensor) -> Tensor:
        """The bytes of a message: on the host, unless they came directly."""
        if not frame.nbytes:
            return _NO_BYTES
        if frame.is_direct:
            return self._direct_payload(peer, frame.nbytes)
        if frame.start:  # a copy: it must be aligned, and the block is used again
            inside = self._empty if frame.on_device else kernels.empty
            payload = inside(frame.nbytes, torch.uint8)
            return payload.copy_(block[frame.start : frame.start + frame.nbytes])
        return self._payloads_from[peer].receive(frame.nbytes)

    def _empty(self, nbytes: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Memory on the host, pinned if tensors may go to an accelerator."""
        if self._device_copy_stream is not None:
            return torch.empty(nbytes, dtype=dtype, pin_memory=True)
        return kernels.empty(nbytes, dtype)

    def _direct_payload(self, peer: int, nbytes: int) -> Tensor:
        if self._payloads is None:
            raise WireError("its payload comes directly, for which there is no group here")
        group = self._payload_group(peer, self.rank)
        payload = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        with self._payload_locks[id(group)]:
            work = group.recv([payload], peer, 0)
        work.wait()  # on an accelerator: what comes after it on this stream
        return payload
