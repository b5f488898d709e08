"""Starts kernels without the dispatch of Triton's JIT, which takes longer than many of them run.

The first launch of its kind goes through the JIT, which compiles and returns the compiled kernel.
Later ones call that directly. What they must have in common is all that the JIT compiles apart: the
device; names and values of constants and options; of a tensor the dtype and whether its address is
a multiple of 16; of an integer the width, and unless it is in `do_not_specialize` whether it is 1
or a multiple of 16; of anything else its type. A key that leaves out one of these would start a
kernel that reads at wrong places. Tensors are passed by their addresses; their device is part of
the key, so that one of the CPU is refused as the JIT refuses it.

The JIT takes everything else: versions of Triton that nobody has looked at, other devices than
CUDA's, interpreted kernels, arguments of other kinds, and all launches while somebody observes or
debugs them.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_Describe = Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]]

# Versions whose compiled kernels are started as below. Up to 3.2 they take no constants.
_KNOWN = ((3, 2), (3, 9))
_WITH_CONSTANTS = (3, 3)


class Compiled(NamedTuple):
    """What starts a compiled kernel, and what follows the arguments."""

    run: Callable[..., None]
    function: Any
    metadata: Any
    constants: tuple[Any, ...]


class Starter:
    """The compiled kernels of one JIT function; `direct` is whether it has any to be started."""

    __slots__ = ("_constants", "_describe", "_kinds", "compiled", "direct", "kernel")

    def __init__(self, kernel: Any, arguments: tuple[Any, ...]) -> None:
        self.kernel = kernel  # which keeps its id from being given away
        self.compiled: dict[tuple[Any, ...], Compiled] = {}
        self._kinds = tuple(map(_kind, arguments))
        params = _runtime_params(kernel)
        self.direct = params is not None and len(params) == len(arguments) and all(self._kinds)
        if params is not None and self.direct:
            self._constants = tuple(p.name for p in kernel.params[len(params) :])
            self._describe = describer(self._kinds, [_specialized(p) for p in params])

    def describe(
        self, device: int, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """What the compiled kernel is called with, and the key to find it. TypeError or
        AttributeError for arguments of other kinds than the first."""
        given, parts = self._describe(*arguments)
        kinds = map(type, options.values())  # 1 and True are compiled apart
        return given, (device, *options, *options.values(), *kinds, *parts)

    def keep(
        self,
        key: tuple[Any, ...],
        arguments: tuple[Any, ...],
        options: dict[str, Any],
        kernel: object,
    ) -> None:
        """Keeps what the JIT has compiled and started, if it may be started directly."""
        if not isinstance(kernel, CompiledKernel) or tuple(map(_kind, arguments)) != self._kinds:
            return
        if not all(x.is_cuda for x in arguments if isinstance(x, Tensor)):
            return
        if not all(name in options for name in self._constants) or not _is_plain():
            return
        given: Any = kernel
        constants = tuple(options[name] for name in self._constants) if _takes_constants() else ()
        self.compiled[key] = Compiled(given.run, given.function, given.packed_metadata, constants)


_starters: dict[int, Starter] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Starts a kernel on a grid of programs; an empty grid starts none.

    Arguments that are no constants go by position. The compiler may not contract a * b + c.
    """
    if not all(grid):
        return
    starter = _starters.get(id(kernel))
    if starter is None:
        starter = _starters[id(kernel)] = Starter(kernel, arguments)
    if not starter.direct or _is_observed() or kernel.pre_run_hooks:
        kernel[grid](*arguments, **options, enable_fp_fusion=False)
        return
    try:
        device = torch._C._cuda_getDevice()
        given, key = starter.describe(device, arguments, options)
        found = starter.compiled.get(key)
    except (AttributeError, TypeError, RuntimeError):  # kinds of arguments that are not kept
        kernel[grid](*arguments, **options, enable_fp_fusion=False)
        return
    if found is None:
        made = kernel[grid](*arguments, **options, enable_fp_fusion=False)
        starter.keep(key, arguments, options, made)
        return
    x, y, z = (*grid, 1, 1)[:3]
    stream = torch._C._cuda_getCurrentRawStream(device)
    run, function, metadata, constants = found
    run(x, y, z, stream, function, metadata, None, None, None, *given, *constants)


def describer(kinds: tuple[str, ...], specialized: list[tuple[bool, bool]]) -> _Describe:
    """A function of a kernel's arguments that returns what is passed for them, and their part of
    the key.

    `kinds` are those of `_kind`; `specialized` is, of each, whether the compiler may know that it
    is 1, and that it is a multiple of 16. It is generated, since it is called at every launch.
    """
    names = [f"a{i}" for i in range(len(kinds))]
    lines: list[str] = []
    given: list[str] = []
    parts: list[str] = []
    for name, kind, (is_one, is_aligned) in zip(names, kinds, specialized):
        if kind == "tensor":
            lines.append(f"p{name} = {name}.data_ptr()")
            given.append(f"p{name}")
            parts += [f"{name}.dtype", f"{name}.get_device()"]
            if is_one and is_aligned:
                parts.append(f"not p{name} & 15")
            continue
        given.append(name)
        parts.append(f"{name}.__class__")
        if kind == "int":
            parts += [f"-0x80000000 <= {name} <= 0x7FFFFFFF", f"{name} > 0x7FFFFFFFFFFFFFFF"]
            if is_one:
                parts.append(f"{name} == 1")
                if is_aligned:
                    parts.append(f"not {name} & 15")
    results = ("".join(f"{x}, " for x in each) for each in (given, parts))
    lines.append("return ({}), ({})".format(*results))
    made: dict[str, Any] = {}
    exec(f"def describe({', '.join(names)}):\n " + "\n ".join(lines), made)
    return made["describe"]


def _kind(argument: object) -> str:
    """Empty for what is left to the JIT."""
    if isinstance(argument, Tensor):
        return "tensor"
    name = type(argument)
    return {int: "int", float: "float", bool: "bool"}.get(name, "none" if argument is None else "")


def _specialized(param: Any) -> tuple[bool, bool]:
    return not param.do_not_specialize, not param.do_not_specialize_on_alignment


def _runtime_params(kernel: Any) -> list[Any] | None:
    """Those parameters of a JIT function that are no constants, if they come first and the JIT is
    one that is known."""
    if type(kernel) is not JITFunction or not _KNOWN[0] <= _version() <= _KNOWN[1]:
        return None
    if torch.version.hip is not None:
        return None
    params = [p for p in kernel.params if not p.is_constexpr]
    return params if kernel.params[: len(params)] == params else None


def _version() -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", triton.__version__)[:2])


def _takes_constants() -> bool:
    return _version() >= _WITH_CONSTANTS


def _is_plain() -> bool:
    """Whether kernels are compiled for CUDA, without instruments."""
    compilation = getattr(_KNOBS, "compilation", None)
    if getattr(compilation, "instrumentation_mode", "") or _is_observed():
        return False
    return _backend() == "cuda"


def _backend() -> str:
    return str(driver.active.get_current_target().backend)


_KNOBS = getattr(triton, "knobs", None)
# Where hooks of launches are found; before 3.4 in the class of compiled kernels.
_HOOKS: Any = CompiledKernel if _KNOBS is None else _KNOBS.runtime


def _is_observed() -> bool:
    """Whether somebody wants to know of launches, or kernels that are compiled in another way."""
    hooks = _HOOKS
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
    return bool(
        getattr(enter, "calls", enter)  # since 3.5 there is always a chain, of no calls
        or getattr(leave, "calls", leave)
        or getattr(hooks, "debug", False)
        or getattr(hooks, "add_stages_inspection_hook", None)
    )
