"""Recordings on CUDA: what is computed on a stream is captured as a graph.

All graphs of a recorder share the memory in which they compute, since only one runs at a time.
"""

import contextlib
import gc
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.training.evaluation.graphs import Part, Recorder, Recording

VARIABLE = "GRADWIRE_CUDA_GRAPHS"
# Parts of a computation that may run at the same time. Each stream keeps a workspace of cuBLAS.
_NUM_STREAMS = 8


def recorder_for(device: torch.device) -> Recorder | None:
    """None on other devices, and with GRADWIRE_CUDA_GRAPHS=0."""
    if device.type != "cuda" or os.environ.get(VARIABLE) == "0":
        return None
    return CudaRecorder(device)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Without Python's collector, which may come upon another graph: to free one ends a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CudaRecorder:
    """Captures work on one device."""

    def __init__(self, device: torch.device, num_streams: int = _NUM_STREAMS) -> None:
        self._device = device
        self._num_streams = num_streams
        self._stream: torch.cuda.Stream | None = None  # where work is captured
        self._streams: list[torch.cuda.Stream] = []  # of its parts
        self._pool: Any = None
        self._last: torch.cuda.Stream | None = None  # where the latest replay was started

    def record(self, work: Part) -> Recording:
        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream = torch.cuda.Stream()
                self._streams = [torch.cuda.Stream() for _ in range(self._num_streams)]
                self._pool = torch.cuda.graph_pool_handle()
            before = torch.cuda.current_stream()
            self._stream.wait_stream(before)
            try:
                with torch.cuda.stream(self._stream):
                    work()  # libraries allocate a workspace for each new stream
                    torch.cuda.synchronize()
                    torch.cuda.empty_cache()  # while a graph is captured nothing can be freed
                    return self._capture(work)
            finally:
                before.wait_stream(self._stream)

    def _capture(self, work: Part) -> Recording:
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on: those of NCCL ask for events all the time.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            with _no_collection():
                results = work()
            graph.capture_end()
        except BaseException:
            with contextlib.suppress(Exception):
                graph.capture_end()  # unless it is this that failed
            del graph
            self._clean_up()
            raise
        return Recording(results, graph.replay)

    def _clean_up(self) -> None:
        """Ends what a capture that failed leaves behind, if it does."""
        names = "_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"  # before 2.8
        end = next((getattr(torch._C, name) for name in names if hasattr(torch._C, name)), None)
        if end is not None:
            with contextlib.suppress(Exception):  # it is an error if that has ended
                end(torch.cuda.current_device(), self._pool)
                torch._C._cuda_releasePool(torch.cuda.current_device(), self._pool)
        # Torch's generator believes that it is still captured, until a capture ends well.
        with contextlib.suppress(Exception):
            x = torch.zeros(1, device=self._device)
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                x.add_(1)
            finally:
                graph.capture_end()

    def side_by_side(self, parts: Sequence[Part]) -> list[Sequence[Tensor]]:
        stream = torch.cuda.current_stream()
        streams = self._streams[: len(parts)]
        for one in streams:
            one.wait_stream(stream)
        results: list[Sequence[Tensor]] = []  # all, so that no part writes over those of another
        try:
            for number, part in enumerate(parts):
                with torch.cuda.stream(streams[number % len(streams)]):
                    results.append(part())
        finally:
            for one in streams:
                stream.wait_stream(one)
        return results

    def wait_for_others(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        if self._last is not None and self._last != stream:
            stream.wait_stream(self._last)
        self._last = stream
