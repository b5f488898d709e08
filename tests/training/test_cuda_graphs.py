"""How work is captured, on a pretended device: streams are waited for, failures cleaned up."""

import contextlib
import gc
from collections.abc import Iterator

import pytest
import torch

from gradwire.training.evaluation.cuda_graphs import CudaRecorder


class Device:
    """Notes what is asked of `torch.cuda`, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[object, ...]] = []
        self.num_streams = 0
        self.current = self.stream()
        self.is_capturing = self.ends_badly = False

    def stream(self) -> "Stream":
        self.num_streams += 1
        return Stream(self, self.num_streams - 1)

    @contextlib.contextmanager
    def on(self, stream: "Stream") -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class Stream:
    def __init__(self, device: Device, number: int) -> None:
        self.device, self.number = device, number

    def wait_stream(self, other: "Stream") -> None:
        self.device.log.append(("wait", self.number, other.number))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()

    class Graph:
        def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
            assert capture_error_mode == "thread_local"
            assert not device.is_capturing
            device.is_capturing = True
            device.log.append(("begin", device.current.number, pool))

        def capture_end(self) -> None:
            if not device.is_capturing:
                raise RuntimeError("nothing is captured")
            device.is_capturing = False
            device.log.append(("end", device.current.number))
            if device.ends_badly:
                device.ends_badly = False
                raise RuntimeError("the capture is invalid")

        def replay(self) -> None:
            device.log.append(("replay", device.current.number))

    zeros = torch.zeros
    fakes = {
        "Stream": device.stream,
        "CUDAGraph": Graph,
        "stream": device.on,
        "device": lambda device: contextlib.nullcontext(),
        "current_device": lambda: 0,
        "current_stream": lambda where=None: device.current,
        "graph_pool_handle": lambda: "pool",
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch, "zeros", lambda *size, device: zeros(*size))
    monkeypatch.setattr(
        torch._C,
        "_cuda_endAllocateToPool",
        lambda index, pool: device.log.append(("pool ends", pool)),
        raising=False,
    )
    monkeypatch.setattr(
        torch._C,
        "_cuda_releasePool",
        lambda index, pool: device.log.append(("pool released", pool)),
        raising=False,
    )
    return device


def recorder(num_streams: int = 2) -> CudaRecorder:
    return CudaRecorder(torch.device("cuda", 0), num_streams)


def test_work_is_done_once_and_then_captured(device: Device) -> None:
    collects: list[bool] = []

    def work() -> list[torch.Tensor]:
        device.log.append(("work", device.current.number))
        collects.append(gc.isenabled())
        return [torch.ones(1)]

    recording = recorder().record(work)
    recording.replay()
    assert device.log == [
        ("wait", 1, 0),
        ("work", 1),
        ("begin", 1, "pool"),
        ("work", 1),
        ("end", 1),
        ("wait", 0, 1),
        ("replay", 0),
    ]
    assert collects == [True, False]
    assert gc.isenabled()


def test_parts_begin_after_what_came_before_and_are_waited_for(device: Device) -> None:
    ours = recorder()

    def part(number: int) -> list[torch.Tensor]:
        device.log.append(("part", number, device.current.number))
        return [torch.tensor([number])]

    def work() -> list[torch.Tensor]:
        parts = [lambda number=number: part(number) for number in range(3)]
        return [torch.cat([result for (result,) in ours.side_by_side(parts)])]

    (result,) = ours.record(work).results
    assert result.tolist() == [0, 1, 2]
    captured = device.log[device.log.index(("begin", 1, "pool")) + 1 : -2]
    assert captured == [
        ("wait", 2, 1),
        ("wait", 3, 1),
        ("part", 0, 2),
        ("part", 1, 3),
        ("part", 2, 2),
        ("wait", 1, 2),
        ("wait", 1, 3),
    ]


def test_failed_work_leaves_no_capture(device: Device) -> None:
    ours = recorder()

    def part() -> list[torch.Tensor]:
        if device.is_capturing:
            raise ZeroDivisionError
        return [torch.ones(1)]

    with pytest.raises(ZeroDivisionError):
        ours.record(lambda: ours.side_by_side([part, part])[0])
    assert not device.is_capturing
    assert device.current.number == 0
    assert device.log.count(("wait", 1, 2)) == device.log.count(("wait", 2, 1)) == 2
    assert gc.isenabled()
    # A capture that ends well follows, on the stream of the failed one.
    assert device.log[-3:] == [("begin", 1, None), ("end", 1), ("wait", 0, 1)]


def test_an_invalid_capture_gives_its_memory_back(device: Device) -> None:
    device.ends_badly = True
    with pytest.raises(RuntimeError, match="the capture is invalid"):
        recorder().record(lambda: [torch.ones(1)])
    assert ("pool ends", "pool") in device.log
    assert ("pool released", "pool") in device.log
    assert not device.is_capturing
    assert device.current.number == 0


def test_replays_on_another_stream_wait(device: Device) -> None:
    ours, side = recorder(), device.stream()
    ours.wait_for_others()
    ours.wait_for_others()
    assert device.log == []
    with device.on(side):
        ours.wait_for_others()
    ours.wait_for_others()
    assert device.log == [("wait", side.number, 0), ("wait", 0, side.number)]
