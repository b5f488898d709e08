"""Compiles the kernels that the cases of triton_cases/ start for an H100 or H200, without a GPU.

    python tests/kernels/compile_triton.py [module ...] [--ones] [--ptx FOLDER]

Interpreted kernels accept much that the compiler refuses. Nothing is run, so what an operation
reads of its results is garbage; an error in such a place is shown and is no failure.

An integer argument that is 1 is a constant for the compiler, which has no `to`. With `--ones` the
front end alone sees the kernels of all cases: as they are started, with each integer argument set
to 1, and with all of them.
"""

import argparse
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[1]))
from kernels.triton_cases import all_cases

_run, _add_stages = JITFunction.run, CUDABackend.add_stages


class _NoDevice:
    """A driver of a device that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class CompileError(Exception):
    """A kernel that the compiler refuses."""


class _SeenError(Exception):
    """Raised in place of what comes after the front end."""


class Ones:
    """Shows kernels with arguments of 1 to the compiler's front end, which takes milliseconds."""

    def __init__(self) -> None:
        self.seen = 0
        self._tried: set[object] = set()

    def show(self, kernel: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        whole = [
            i
            for i, value in enumerate(args)
            if type(value) is int and not kernel.params[i].do_not_specialize
        ]
        kinds = tuple(getattr(value, "dtype", type(value)) for value in args)
        key = kernel.__module__, kernel.__name__, kinds, str(sorted(named.items()))
        if key in self._tried:
            return
        self._tried.add(key)
        for ones in {(), *((i,) for i in whole), tuple(whole)}:
            given = [1 if i in ones else value for i, value in enumerate(args)]
            with mock.patch.object(CUDABackend, "add_stages", _front_end):
                try:
                    _run(kernel, *given, grid=(1,), warmup=True, **named)
                except _SeenError:
                    self.seen += 1
                except Exception as error:
                    names = ", ".join(kernel.arg_names[i] for i in ones)
                    raise CompileError(f"{kernel.__name__}, {names} = 1: {error}") from error


def _front_end(self: Any, stages: dict[str, Any], *rest: Any) -> None:
    _add_stages(self, stages, *rest)
    for name in list(stages)[1:]:
        stages[name] = _stop


def _stop(*_: Any) -> None:
    raise _SeenError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*", help="all if none is named")
    parser.add_argument("--ones", action="store_true", help="arguments of 1, front end only")
    parser.add_argument("--ptx", type=Path, help="a folder for the code that is made")
    options = parser.parse_args()
    driver.set_active(_NoDevice())
    ones, compiled = Ones(), {}

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool = False, **named: Any) -> Any:
        if options.ones:
            return ones.show(self, args, named)
        start = time.perf_counter()
        try:
            kernel = _run(self, *args, grid=grid, warmup=True, **named)
        except Exception as error:
            raise CompileError(f"{self.__name__}: {error}") from error
        if kernel.hash not in compiled:
            compiled[kernel.hash] = kernel
            took = time.perf_counter() - start
            print(f"{self.__module__}.{self.__name__}: {took:.1f} s", flush=True)
            if options.ptx is not None:
                options.ptx.mkdir(parents=True, exist_ok=True)
                name = f"{self.__module__.rpartition('.')[2]}.{self.__name__}.{len(compiled)}"
                (options.ptx / f"{name}.ptx").write_text(kernel.asm["ptx"])
                (options.ptx / f"{name}.cubin").write_bytes(kernel.asm["cubin"])
        return kernel

    JITFunction.run = compile_only
    failures = 0
    for case in all_cases():
        if not case.compiled and not options.ones:
            continue
        if options.modules and case.module not in options.modules:
            continue
        try:
            case.run("triton")
        except CompileError:
            failures += 1
            print(f"FAILED {case}\n{traceback.format_exc(limit=-6)}", flush=True)
        except Exception as error:  # of results that were never computed
            print(f"{case} ends with {error!r}")
    print(f"{len(compiled)} kernels compiled, {ones.seen} seen with ones, {failures} cases failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
