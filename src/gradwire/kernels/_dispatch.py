"""Chooses, per call, which backend runs an operation.

On the CPU the C library runs if it was built and loads, else the torch reference, with one
warning; on other devices the reference, but for a few operations of very many small steps, which
go through the CPU. The environment variable GRADWIRE_KERNELS overrides:
`reference` forces the readable one, `native` makes a missing C library an error.
"""

import os
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from gradwire.kernels.native._library import LibraryError, load
from gradwire.warning import GradwireWarning

Operation = TypeVar("Operation", bound=Callable[..., Any])

_VARIABLE = "GRADWIRE_KERNELS"


@cache
def _warn_once(reason: str) -> None:
    warnings.warn(
        f"gradwire runs its torch reference kernels because {reason}; reinstall "
        f"gradwire where there is a C compiler, or set {_VARIABLE}=reference to accept this",
        GradwireWarning,
        stacklevel=5,  # the caller of the public operation
    )


def cpu_backend() -> Literal["native", "reference"]:
    """What runs on CPU tensors."""
    wish = os.environ.get(_VARIABLE, "")
    if wish not in ("", "native", "reference"):
        raise ValueError(f"{_VARIABLE} is {wish!r}; it can be 'native', 'reference' or unset")
    if wish == "reference":
        return "reference"
    try:
        load()
    except LibraryError as error:
        if wish == "native":
            raise ValueError(
                f"{_VARIABLE} is 'native' but {error}; reinstall gradwire where there is "
                f"a C compiler, or unset {_VARIABLE}"
            ) from error
        _warn_once(str(error))
        return "reference"
    return "native"


def pick(device: torch.device, native: Operation, reference: Operation) -> Operation:
    """The one of an operation's implementations to run on tensors of `device`."""
    if device.type == "cpu" and cpu_backend() == "native":
        return native
    return reference


def pick_stepwise(
    device: torch.device,
    native: Callable[..., Tensor],
    reference: Callable[..., Tensor],
) -> Callable[..., Tensor]:
    """As `pick`, for an operation of thousands of small steps, each of which needs the one before.

    To start them one by one on another device takes far longer than to copy its tensors to the C
    library and the result back.
    """
    if cpu_backend() != "native":
        return reference
    return native if device.type == "cpu" else _run_on_cpu(device, native)


def _run_on_cpu(device: torch.device, native: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*arguments: Any) -> Tensor:
        here = (each.cpu() if isinstance(each, Tensor) else each for each in arguments)
        return native(*here).to(device)

    return run
