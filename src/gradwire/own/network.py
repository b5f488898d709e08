"""Makes a user's own module ready: built by a factory if there is one, and looked at."""

from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

from gradwire.core.generators import seeded

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_WANTED = "an nn.Module, or a function without arguments that makes one"


def build_module(name: str, given: Any, seed: int) -> nn.Module:
    """The module; a factory draws its initial weights from generators with this seed."""
    module = given
    if not isinstance(given, nn.Module):
        if not callable(given):
            raise ValueError(f"{name}: expected {_WANTED}; got {given!r}")
        try:
            with seeded(seed):
                module = given()
        except Exception as error:
            raise ValueError(
                f"{name}: making the model failed: {type(error).__name__}: {error}. Expected "
                f"{_WANTED}."
            ) from error
        if not isinstance(module, nn.Module):
            raise ValueError(f"{name} returned {module!r}. Expected {_WANTED}.")
    _check(name, module)
    original = getattr(module, "_orig_mod", module)  # of what torch.compile made
    return original if isinstance(original, nn.Module) else module


def _check(name: str, module: nn.Module) -> None:
    if isinstance(module, _WRAPPERS):
        raise ValueError(
            f"{name} is wrapped in {type(module).__name__}, which exchanges gradients itself: give "
            "the module inside, wrapped.module"
        )
    for key, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(
                f"{name}: the parameter {key} of a lazy layer has no shape yet: call the module on "
                "a batch once before you hand it over"
            )
        if parameter.device.type == "meta":
            raise ValueError(f"{name}: the parameter {key} is on the meta device: it has no values")
