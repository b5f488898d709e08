"""Cases of Triton's operations, a file for each module of `gradwire/kernels/triton`.

A file has a generator `cases()`. test_triton.py runs every case with interpreted kernels and with
the reference, compile_triton.py compiles the kernels that the cases start for CUDA; neither needs
to know of a new file.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Around bytes, blocks of sums and tiles of programs.
NUMELS = (0, 1, 7, 8, 9, 255, 256, 257, 1000)
SEED, STREAM = 2**63 + 5, (3, 2**32 - 1, 4)


class Case(NamedTuple):
    """One call: results and all tensors among the arguments, which may be written, are compared."""

    module: str  # of kernels/triton and kernels/reference
    operation: str
    name: str
    arguments: Callable[[], tuple[Any, ...]]  # new ones at each call
    compiled: bool = False  # whether compile_triton.py takes it, too: each takes seconds
    returns: bool = True  # whether results are compared; else only the arguments

    def __str__(self) -> str:
        return f"{self.module}.{self.operation}({self.name})"

    def run(self, backend: str) -> list[Any]:
        """What `backend`, "triton" or "reference", makes of it."""
        module = importlib.import_module(f"gradwire.kernels.{backend}.{self.module}")
        arguments = self.arguments()
        results = getattr(module, self.operation)(*arguments)
        return [*flattened(results if self.returns else ()), *flattened(arguments)]


def all_cases() -> Iterator[Case]:
    for module in pkgutil.iter_modules(__path__):
        yield from importlib.import_module(f"{__name__}.{module.name}").cases()


def flattened(value: Any) -> list[Any]:
    """What is in tuples and lists, at all depths."""
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in flattened(item)]
    return [value]


def same_bits(a: Any, b: Any) -> bool:
    """Unlike `torch.equal`, this tells -0.0 from 0.0, dtypes and devices; every NaN is one."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and (a == b or (a != a and b != b))
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.is_floating_point():
        nan = a.isnan()
        if not torch.equal(nan, b.isnan()):
            return False
        integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        a, b = (x.contiguous().masked_fill(nan, 0).view(integer) for x in (a, b))
    return torch.equal(a, b)


def vector(numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """A quarter whole numbers, so that there are zeros of both signs and equal magnitudes; a
    quarter of very different magnitudes, subnormal numbers included."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    x[::4] = x[::4].round()
    x[1::4] *= 10.0 ** torch.empty(len(x[1::4])).uniform_(-44, 30, generator=generator)
    return x.to(dtype)


def spoiled(numel: int, bad: float, seed: int = 0) -> Tensor:
    """A vector with one element that is not finite."""
    x = vector(numel, seed)
    x[numel // 2] = bad
    return x
