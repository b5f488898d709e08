"""Elements kept at random in proportion to their magnitude."""

import torch
from torch import Tensor

from gradwire.kernels._checks import fuses
from gradwire.kernels._dispatch import InTriton, pick
from gradwire.kernels.native import drawn as native
from gradwire.kernels.reference import drawn as reference

triton = InTriton("drawn")


def draw_candidates(
    x: Tensor, factor: float, seed: int, stream: tuple[int, int, int], capacity: int = 4096
) -> tuple[Tensor, Tensor, Tensor]:
    """Where |x| factor + 1 >= h: positions (int64), values and h (int32).

    Each element has an h of its own, uniform on 0 .. 65535. So of an element to be kept with
    probability p = |x| factor / 65536 the first 16 bits of a uniform number are known: it is kept
    if h < |x| factor and dropped if h > |x| factor, but for rounding errors, and undecided where
    both are within one. `factor` is rounded to float32; more than `capacity` take a second pass.
    """
    if not 0 <= factor <= torch.finfo(torch.float32).max:
        raise ValueError(f"draw_candidates takes a factor of float32's range, got {factor}")
    run = reference.draw_candidates
    if fuses(x):
        run = pick(x.device, native.draw_candidates, run, triton.draw_candidates)
    rounded = float(torch.tensor(factor, dtype=torch.float32))
    return run(x.reshape(-1), rounded, seed, stream, max(0, capacity))
