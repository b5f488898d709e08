"""Turns the parts of a DATA message into the arrival that the caller gets."""

import torch
from torch import Tensor

from gradwire.runtime.process import frames
from gradwire.runtime.process.frames import Headers
from gradwire.runtime.process.transport import ARRIVED, DONE, GOODBYE, Arrival
from gradwire.runtime.zeromq.errors import Refusal
from gradwire.runtime.zeromq.messages import Header

BLOCK_NBYTES = 1 << 20
_NO_BYTES = torch.empty(0, dtype=torch.uint8)
_ALIGNED_NBYTES = 8


class ArrivalDecoder:
    """For one node; parts that are no valid message are a `WireError`."""

    def __init__(
        self, size: int, headers: Headers, max_payload_nbytes: int, device: torch.device | None
    ) -> None:
        self._size = size
        self._headers = headers
        self._max_payload_nbytes = max_payload_nbytes
        self._device = device

    def decode(
        self, header: Header, body: memoryview, payload: memoryview | None, number: int
    ) -> Arrival:
        frame = frames.unpack(
            body,
            self._headers,
            self._max_payload_nbytes,
            block_nbytes=BLOCK_NBYTES,
            is_exact=True,
        )
        num_received = 0 if payload is None else len(payload)
        if frame.num_to_come != num_received or header.nbytes != num_received:
            raise Refusal("malformed", f"{num_received} bytes follow, not {frame.num_to_come}")
        src = header.src
        if not 0 <= src < self._size:
            raise Refusal("source", f"there is no rank {src}")
        if frame.kind == frames.GOODBYE:
            if frame.tag > self._size:
                raise Refusal("malformed", f"it lost rank {frame.tag - 1} of {self._size}")
            return Arrival(GOODBYE, src, tag=frame.tag, number=number)
        if frame.kind == frames.DONE:
            return Arrival(DONE, src, frame.job, frame.tag, number=number)
        message = frame.message(self._memory(frame, body, payload))
        return Arrival(ARRIVED, src, frame.job, frame.tag, message, number=number)

    def _memory(self, frame: frames.Frame, body: memoryview, payload: memoryview | None) -> Tensor:
        """The bytes of the tensor, copied only if they are not aligned for its dtype."""
        if payload is not None:
            data = torch.frombuffer(payload, dtype=torch.uint8)
            if data.data_ptr() % _ALIGNED_NBYTES:
                data = data.clone()
        elif frame.nbytes:
            inside = bytearray(body[frame.start : frame.start + frame.nbytes])
            data = torch.frombuffer(inside, dtype=torch.uint8)
        else:
            data = _NO_BYTES
        if frame.on_device and self._device is not None:
            data = data.to(self._device)
        return data
