"""Compiles the kernels that the cases of triton_cases/ start for an H100 or H200, without a GPU.

    python tests/kernels/compile_triton.py [module ...] [--ptx FOLDER]

Interpreted kernels accept much that the compiler refuses. Nothing is run, so what an operation
reads of its results is garbage; an error in such a place is shown and is no failure.
"""

import argparse
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[1]))
from kernels.triton_cases import all_cases


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*", help="all if none is named")
    parser.add_argument("--ptx", type=Path, help="a folder for the code that is made")
    options = parser.parse_args()
    driver.set_active(_NoDevice())
    run, compiled = JITFunction.run, {}

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool = False, **named: Any) -> Any:
        start = time.perf_counter()
        try:
            kernel = run(self, *args, grid=grid, warmup=True, **named)
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
        if not case.compiled or (options.modules and case.module not in options.modules):
            continue
        try:
            case.run("triton")
        except CompileError:
            failures += 1
            print(f"FAILED {case}\n{traceback.format_exc(limit=-6)}", flush=True)
        except Exception as error:  # of results that were never computed
            print(f"{case} ends with {error!r}")
    print(f"{len(compiled)} kernels compiled, {failures} cases failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
