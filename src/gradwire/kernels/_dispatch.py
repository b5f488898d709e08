"""Chooses, per call, which backend runs an operation.

On the CPU the C library runs if it was built and loads, on CUDA Triton's kernels if Triton is
installed; else the torch reference, with one warning. An operation that a backend does not have
runs in the reference; a few of very many small steps go through the CPU instead. The environment
variable GRADWIRE_KERNELS overrides: `reference` forces the readable one, `native` makes a missing C
library an error, `triton` a missing Triton. With `triton` and TRITON_INTERPRET=1 Triton's kernels
are interpreted for CPU tensors, too: slow, for tests.
"""

import os
import warnings
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from gradwire.kernels.native._library import LibraryError, load
from gradwire.warning import GradwireWarning

Operation = TypeVar("Operation", bound=Callable[..., Any])
Pair = tuple[Tensor, Tensor]
Wish = Literal["", "native", "reference", "triton"]

_VARIABLE = "GRADWIRE_KERNELS"
_INTERPRET = "TRITON_INTERPRET"
# An operation asks a dozen times. That `os.environ` has no such variable takes it an exception, and
# the dictionary behind it a fortieth of that time.
_ENVIRON: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
_KEY: Any = _VARIABLE if _ENVIRON is os.environ else os.environ.encodekey(_VARIABLE)


class TritonError(Exception):
    """Triton cannot be imported."""


class InTriton:
    """The operations of a module of `kernels/triton`, which is imported when one is called: not
    everybody has Triton."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, operation: str) -> Callable[[], Any]:
        found = partial(_load_triton, self._module, operation)
        setattr(self, operation, found)  # found here from now on
        return found


@cache
def _load_triton(module: str, operation: str) -> Any:
    return getattr(import_module(f"gradwire.kernels.triton.{module}"), operation)


@cache
def _warn_once(reason: str, remedy: str) -> None:
    warnings.warn(
        f"gradwire runs its torch reference kernels because {reason}; {remedy}, or set "
        f"{_VARIABLE}=reference to accept this",
        GradwireWarning,
        stacklevel=5,  # the caller of the public operation
    )


def _wish() -> Wish:
    if _KEY not in _ENVIRON:
        return ""
    wish = os.environ.get(_VARIABLE, "")
    if wish not in ("", "native", "reference", "triton"):
        raise ValueError(
            f"{_VARIABLE} is {wish!r}; it can be 'native', 'reference', 'triton' or unset"
        )
    return wish  # type: ignore[return-value]


def cpu_backend() -> Literal["native", "reference"]:
    """What runs on CPU tensors."""
    wish = _wish()
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
        _warn_once(str(error), "reinstall gradwire where there is a C compiler")
        return "reference"
    return "native"


def runs_triton(device: torch.device) -> bool:
    """Whether Triton's kernels run on tensors of a device."""
    wish = _wish()
    if device.type == "cpu":
        return wish == "triton" and os.environ.get(_INTERPRET) == "1"
    if device.type != "cuda" or wish == "reference":
        return False
    try:
        _import_triton()
    except TritonError as error:
        if wish == "triton":
            raise ValueError(
                f"{_VARIABLE} is 'triton' but {error}; install triton, or unset {_VARIABLE}"
            ) from error
        _warn_once(str(error), "install triton")
        return False
    return True


@cache
def _import_triton() -> None:
    try:
        import_module("triton")
    except ImportError as error:
        raise TritonError(f"triton cannot be imported ({error})") from error


def pick(
    device: torch.device,
    native: Operation,
    reference: Operation,
    triton: Callable[[], Operation] | None = None,
) -> Operation:
    """The one of an operation's implementations to run on tensors of `device`.

    `triton` is an attribute of an `InTriton`; None where it has no such operation.
    """
    if triton is not None and runs_triton(device):
        return _on_device(device, triton())
    if device.type == "cpu" and cpu_backend() == "native":
        return native
    return reference


def _on_device(device: torch.device, operation: Operation) -> Operation:
    """Triton launches on the current device, which may not be that of the tensors."""
    if device.type == "cpu" or device.index is None:
        return operation
    if device.index == torch.cuda.current_device():
        return operation

    def run(*arguments: Any, **named: Any) -> Any:
        with torch.cuda.device(device):
            return operation(*arguments, **named)

    return run  # type: ignore[return-value]


def pick_into(
    device: torch.device,
    native: Callable[..., Pair],
    reference: Callable[..., Pair],
    triton: Callable[[], Callable[..., Pair]],
) -> Callable[..., Pair]:
    """As `pick`, for two results that `into`, if it is given, has memory for.

    Triton's kernels write into it; what others make is copied.
    """
    if runs_triton(device):
        return _on_device(device, triton())
    make = pick(device, native, reference)

    def run(*arguments: Any, into: Pair | None) -> Pair:
        made = make(*arguments)
        if into is None:
            return made
        for memory, result in zip(into, made):
            memory.copy_(result)
        return into

    return run


def pick_stepwise(
    device: torch.device,
    native: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    triton: Callable[[], Callable[..., Tensor]] | None = None,
) -> Callable[..., Tensor]:
    """As `pick`, for an operation of thousands of small steps, each of which needs the one before.

    To start them one by one on another device takes far longer than to copy its tensors to the C
    library and the result back.
    """
    if triton is not None and runs_triton(device):
        return _on_device(device, triton())
    if cpu_backend() != "native":
        return reference
    return native if device.type == "cpu" else _run_on_cpu(device, native)


def _run_on_cpu(device: torch.device, native: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*arguments: Any) -> Tensor:
        here = (each.cpu() if isinstance(each, Tensor) else each for each in arguments)
        return native(*here).to(device)

    return run
