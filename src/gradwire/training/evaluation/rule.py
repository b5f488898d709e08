"""Which way of evaluation suits a module on a device: a rule, not a timing, so that the same
configuration takes the same way, and gives the same numbers, on every run.

A batch over workers saves the overhead of one operation at a time and pays with memory traffic:
n gradients at once fall out of the cache. Speed-up of vmap over one after another, on two cores
of an AMD EPYC, torch 2.13 (equal parameters / each worker its own):

    network (batch)                     parameters      n = 4          n = 32
    mlp((32,)) on 8 x 8 (32)                 2,410    1.8 / 2.8      7.9 / 8.2
    mlp((128, 64)) on 8 x 8 (32)            17,226    1.7 / 1.7      6.9 / 5.4
    mlp((256, 256)) on 8 x 8 (32)           85,002    1.7 / 1.6      2.8 / 2.0
    mlp((384, 384)) on 8 x 8 (32)          176,650    1.1 / 0.9      1.7 / 1.4
    mlp((512, 512)) on 8 x 8 (32)          301,066    1.4 / 1.2      0.9 / 0.6
    mlp((1024, 1024)) on 8 x 8 (32)      1,126,410    1.3 / 0.8      0.7 / 0.2
    nanogpt(2, width=32), 32 long (8)       30,656    1.5 / 1.4      2.2 / 2.0
    nanogpt(4, width=64), 64 long (8)      212,480    1.4 / 1.3      1.3 / 1.3
    nanogpt, 64 long (8)                   818,176    1.2 / 1.3      1.3 / 1.1
    mnist_cnn (32)                          21,840    1.1 / 0.9      0.9 / 1.0
    resnet20 (16)                          269,722    0.7 / 0.7
"""

from typing import Literal, get_args

import torch
from torch import nn

from gradwire.core.notation import unknown_name

Mode = Literal["auto", "vmap", "sequential"]

_RECURRENT = (nn.RNNBase, nn.RNNCellBase)  # their kernels have no batching rule
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_SMALL = 200_000  # parameters; see the table

# Up to so many networks with convolutions are evaluated one by one on CUDA, side by side: grouped
# convolutions with few groups are slow there. Of 4 x resnet20 on an H200 they took 7.7 ms, 4.5 of
# them for gradients with respect to inputs in kernels without tensor cores.
FEW_ON_CUDA = 8


def resolve(mode: Mode, module: nn.Module, device: torch.device) -> Literal["vmap", "sequential"]:
    """The way to evaluate `module` on `device`: the one asked for, or the better under "auto"."""
    if mode not in get_args(Mode):
        raise ValueError(unknown_name("evaluation mode", mode, list(get_args(Mode))))
    recurrent = _contains(module, _RECURRENT)
    if mode == "vmap" and recurrent:
        raise ValueError(
            f"{type(module).__name__} has recurrent layers, which vmap cannot batch over workers; "
            "use mode sequential or auto"
        )
    if mode != "auto":
        return mode
    if recurrent:
        return "sequential"
    if device.type == "cuda":
        return "vmap"
    num_params = sum(parameter.numel() for parameter in module.parameters())
    small_and_dense = num_params <= _SMALL and not has_convolutions(module)
    return "vmap" if small_and_dense else "sequential"


def has_convolutions(module: nn.Module) -> bool:
    return _contains(module, _CONVOLUTIONS)


def _contains(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    return any(isinstance(layer, kinds) for layer in module.modules())
