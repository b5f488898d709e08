"""One random element of each of k strata."""

import torch
from torch import Tensor

from gradwire.kernels._checks import fuses
from gradwire.kernels._dispatch import InTriton, pick
from gradwire.kernels.native import strata as native
from gradwire.kernels.reference import strata as reference

triton = InTriton("strata")


def strata_positions(
    numel: int, count: int, seed: int, stream: tuple[int, int, int], device: torch.device
) -> Tensor:
    """A random position in each of `count` equal strata of 0 .. numel - 1, int64, ascending."""
    if not 0 <= count <= numel:
        raise ValueError(f"strata_positions: {count} strata of {numel} elements")
    run = pick(device, native.strata_positions, reference.strata_positions, triton.strata_positions)
    return run(numel, count, seed, stream, device)


def strata_values(
    x: Tensor, count: int, seed: int, stream: tuple[int, int, int], scaled: bool = False
) -> Tensor:
    """The elements at `strata_positions`; `scaled` multiplies each by the size of its stratum."""
    if not 0 <= count <= x.numel():
        raise ValueError(f"strata_values: {count} strata of {x.numel()} elements")
    run = reference.strata_values
    if fuses(x):
        run = pick(x.device, native.strata_values, run, triton.strata_values)
    return run(x.reshape(-1), count, seed, stream, scaled)
