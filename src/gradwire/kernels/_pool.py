"""A pool of memory for large results.

For large tensors, beyond 32 MiB always, malloc maps fresh pages, and touching them for the first
time takes several times as long as the kernel that fills them. `empty` hands out tensors over
memory maps; when the last tensor that shares one is collected, its map is kept for the next of that
size. So a result is as immutable and as free to keep as any other tensor. At most `_KEPT` maps
wait to be used again, whatever their sizes: a training step needs a handful.
"""

import ctypes
import mmap
import weakref
from collections import deque

import torch
from torch import Tensor

_LEAST_BYTES = 1 << 22  # below, malloc keeps freed memory itself; up to 32 MiB it may
_KEPT = 8

# Appending and popping are atomic, and a collection may run at any point: no lock is needed, and
# none could be held safely.
_free: deque[mmap.mmap] = deque(maxlen=_KEPT)


def empty(
    numel: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Tensor:
    """An uninitialised vector; torch's own on an accelerator, which keeps memory itself."""
    size = numel * dtype.itemsize
    if size < _LEAST_BYTES or (device is not None and device.type != "cpu"):
        return torch.empty(numel, dtype=dtype, device=device or "cpu")
    memory = _take(size)
    # A new object over the memory for each tensor: torch keeps it as long as the storage lives.
    block = (ctypes.c_char * size).from_buffer(memory)
    weakref.finalize(block, _free.append, memory).atexit = False
    return torch.frombuffer(block, dtype=dtype)


def to_host(x: Tensor) -> Tensor:
    """x on the CPU. From CUDA it is copied into page-locked memory, which torch keeps for the next
    one: that takes a fraction of the time of other memory."""
    if x.device.type != "cuda":
        return x.cpu()
    here = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    here.copy_(x, non_blocking=True)
    torch.cuda.current_stream(x.device).synchronize()
    return here


def from_host(x: Tensor, device: torch.device) -> Tensor:
    """x, of the CPU, on a device. To CUDA it goes through page-locked memory, and nobody waits."""
    if device.type != "cuda":
        return x.to(device)
    # torch does not give that memory to others before the copy is done.
    return x.pin_memory().to(device, non_blocking=True)


def _take(size: int) -> mmap.mmap:
    for _ in range(_KEPT):
        try:
            memory = _free.popleft()
        except IndexError:
            break
        if len(memory) == size:
            return memory
        _free.append(memory)
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
