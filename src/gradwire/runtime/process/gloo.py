"""Messages between processes by torch.distributed's point-to-point operations on gloo.

What is particular to gloo: a receive cannot be polled, so one thread per peer blocks in it. A wait
that expires breaks the connection for good, so the group is one of our own whose timeout is a
year. A receive takes what is shorter than its buffer, and aborts the process if more comes: so a
block of limited length comes first, and says how long the payload is that follows. A peer that
was killed shows as an error of the receive that waits for it.

Sends are posted at once and in order. What they send must live until it has left, so the posted
ones are kept, up to a number of bytes per peer; beyond it the sender waits for the oldest.
Receiving threads take everything that comes, so two that wait in a send do not block each other.
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

from gradwire.core.errors import WireError
from gradwire.runtime.process import frames
from gradwire.runtime.process.frames import BLOCK_NBYTES, Headers, Packed
from gradwire.runtime.process.transport import ARRIVED, DONE, GOODBYE, LOST, Arrival

_NEVER = timedelta(days=365)
_MAX_POSTED = 256  # sends to one peer that are kept, however small
_NO_BYTES = torch.empty(0, dtype=torch.uint8)
_NO_HEADERS = Headers()


class GlooTransport:
    """One rank's end. All ranks of the default process group make theirs at the same time.

    `group` is used as it is if given: its timeout must be longer than any rank is ever silent.
    Tensors that lay on an accelerator are moved to `device` on arrival.
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
    ) -> None:
        made = dist.new_group(backend="gloo", timeout=_NEVER) if group is None else group
        assert isinstance(made, dist.ProcessGroup), "this rank is not in the group"
        self._group = made
        self.rank, self.size = made.rank(), made.size()
        self.num_bytes_sent = 0  # with blocks
        self._headers = headers
        self._max_bytes_posted = max_bytes_posted
        self._max_payload_nbytes = max_payload_nbytes
        self._send_timeout = timedelta(seconds=send_s)
        self._close_s = close_s
        self._device = device
        self._arrivals: SimpleQueue[Arrival] = SimpleQueue()
        self._kept: defaultdict[int, list[Arrival]] = defaultdict(list)
        self._ended: list[Arrival] = []  # of peers that left or were lost
        # Of each peer: what was posted, oldest first, with its bytes; and their sum.
        self._posted: list[deque[tuple[dist.Work, Tensor]]] = [deque() for _ in range(self.size)]
        self._bytes_posted = [0] * self.size
        self._broken: set[int] = set()  # who cannot be sent to
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
        else:
            self._post(dst, frames.pack(job, tag, message, self._headers))

    def send_done(self, dst: int, job: int, number: int) -> None:
        self._post(dst, frames.pack_control(frames.DONE, job, number))

    def next(self, timeout_s: float | None) -> Arrival | None:
        try:
            if timeout_s == 0:
                arrival = self._arrivals.get_nowait()
            else:
                arrival = self._arrivals.get(timeout=timeout_s)
        except Empty:
            return None
        if arrival.kind in (LOST, GOODBYE):
            self._ended.append(arrival)
        return arrival

    def keep(self, arrival: Arrival) -> None:
        self._kept[arrival.job].append(arrival)

    def kept(self, job: int) -> list[Arrival]:
        for other in [other for other in self._kept if other < job]:
            del self._kept[other]
        return self._kept.pop(job, []) + self._ended

    def close(self, lost: int | None = None) -> None:
        """Says goodbye, and waits (not for long) until what was sent has left and all others have
        said goodbye too. Nothing can be sent or received afterwards.

        `lost` is the rank without which this one cannot go on, if that is why it leaves. Others
        that wait for this one then name the rank that was lost, not this one.
        """
        if self._is_closed:
            return
        self._is_closed = True
        for peer in range(self.size):
            if peer != self.rank:
                number = 0 if lost is None else lost + 1
                self._post(peer, frames.pack_control(frames.GOODBYE, 0, number))
        until = monotonic() + self._close_s
        for receiver in self._receivers:
            receiver.join(max(0.0, until - monotonic()))
        # Who said goodbye has read all that was sent to it before its thread ended, or will.
        waiters = [
            threading.Thread(target=self._wait_below, args=(peer, 0, 0), daemon=True)
            for peer in range(self.size)
            if self._posted[peer]
        ]
        for waiter in waiters:
            waiter.start()
        for waiter in waiters:
            waiter.join(max(0.1, until - monotonic()))

    def _post(self, peer: int, packed: Packed) -> None:
        for part in (packed.block, packed.payload):
            if part is None or peer in self._broken:
                continue
            nbytes = part.numel()
            self._wait_below(peer, self._max_bytes_posted - nbytes, _MAX_POSTED - 1)
            try:
                work = self._group.send([part], peer, 0)
            except RuntimeError:
                self._lose(peer)
                return
            self._posted[peer].append((work, part))
            self._bytes_posted[peer] += nbytes
            self.num_bytes_sent += nbytes

    def _wait_below(self, peer: int, max_bytes: int, max_number: int) -> None:
        """Until no more than this is posted, or nothing."""
        posted = self._posted[peer]
        while posted and (self._bytes_posted[peer] > max_bytes or len(posted) > max_number):
            work, part = posted.popleft()
            self._bytes_posted[peer] -= part.numel()
            try:
                work.wait(self._send_timeout)
            except RuntimeError:
                self._lose(peer)
                posted.clear()
                self._bytes_posted[peer] = 0

    def _lose(self, peer: int) -> None:
        # Its receiving thread says that it is lost, after everything that came before.
        self._broken.add(peer)

    def _receive(self, peer: int) -> None:
        """Runs in a thread of its own."""
        block = torch.empty(BLOCK_NBYTES, dtype=torch.uint8)
        view = block.numpy().data
        try:
            while True:
                self._group.recv([block], peer, 0).wait()
                frame = frames.unpack(view, self._headers, self._max_payload_nbytes)
                if frame.kind == frames.GOODBYE:
                    if frame.tag > self.size:
                        raise WireError(f"it lost rank {frame.tag - 1} of {self.size}")
                    self._arrivals.put(Arrival(GOODBYE, peer, tag=frame.tag))
                    return
                if frame.kind == frames.DONE:
                    self._arrivals.put(Arrival(DONE, peer, frame.job, frame.tag))
                    continue
                payload = self._payload(peer, frame, block)
                message = frame.message(payload)
                self._arrivals.put(Arrival(ARRIVED, peer, frame.job, frame.tag, message))
        except WireError as error:
            # Where the next block would begin is not known any more.
            self._arrivals.put(Arrival(LOST, peer, message=f"it sent what is no message: {error}"))
        except RuntimeError as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            self._arrivals.put(Arrival(LOST, peer, message=first))

    def _payload(self, peer: int, frame: frames.Frame, block: Tensor) -> Tensor:
        if not frame.nbytes:
            payload = _NO_BYTES
        elif frame.start:  # a copy: it must be aligned, and the block is used again
            payload = block[frame.start : frame.start + frame.nbytes].clone()
        else:
            payload = torch.empty(frame.nbytes, dtype=torch.uint8)
            self._group.recv([payload], peer, 0).wait()
        if frame.on_device and self._device is not None:
            payload = payload.to(self._device)
        return payload
