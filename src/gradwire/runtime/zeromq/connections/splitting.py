"""Parts of messages as ZeroMQ frames of bounded length.

libzmq allocates what a frame announces before its peer is authenticated, and its limit of a frame
(ZMQ_MAXMSGSIZE) is the same before and after. So with keys frames are short, and a part that is
longer takes several: all but the last have the full length, the last one is shorter, perhaps empty.
"""

from collections.abc import Iterator
from typing import Any

import torch

FRAME_NBYTES = 1 << 16


class JoinedFrames:
    """A part that came in several frames, with the interface of a `zmq.Frame`."""

    def __init__(self, nbytes: int) -> None:
        self.buffer: memoryview = torch.empty(nbytes, dtype=torch.uint8).numpy().data

    @property
    def bytes(self) -> bytes:
        return self.buffer.tobytes()

    def __len__(self) -> int:
        return len(self.buffer)


def split(part: bytes | memoryview) -> Iterator[bytes | memoryview]:
    """The frames of a part, without a copy."""
    view = memoryview(part)
    for start in range(0, len(view) + 1, FRAME_NBYTES):
        yield view[start : start + FRAME_NBYTES]


def join(frames: list[Any], max_nbytes: int) -> list[Any]:
    """The parts of a message; none if one is longer than `max_nbytes` or has no end.

    Frames are released as they are copied.
    """
    parts: list[Any] = []
    frames.reverse()
    while frames:
        count = nbytes = 0
        while count < len(frames):
            length = len(frames[-1 - count])
            count, nbytes = count + 1, nbytes + length
            if length < FRAME_NBYTES:
                break
        else:
            return []
        if nbytes > max_nbytes:
            return []
        if count == 1:
            parts.append(frames.pop())
            continue
        joined, end = JoinedFrames(nbytes), 0
        for _ in range(count):
            frame = frames.pop().buffer
            start, end = end, end + len(frame)
            joined.buffer[start:end] = frame
        parts.append(joined)
    return parts
