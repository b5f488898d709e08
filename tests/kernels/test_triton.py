"""Interpreted Triton kernels against the reference, to the bit, and what compiles for CUDA."""

import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest

from kernels.triton_cases import all_cases, same_bits

pytest.importorskip("triton", reason="Triton is not installed")

_OPERATIONS = {
    key: list(cases)
    for key, cases in groupby(
        sorted(all_cases(), key=lambda case: (case.module, case.operation)),
        key=lambda case: f"{case.module}.{case.operation}",
    )
}


@pytest.mark.parametrize("operation", _OPERATIONS)
def test_triton_equals_reference(operation):
    for case in _OPERATIONS[operation]:
        found, expected = case.run("triton"), case.run("reference")
        assert len(found) == len(expected), case
        for number, pair in enumerate(zip(found, expected)):
            assert same_bits(*pair), f"{case}: value {number} is {pair[0]}, expected {pair[1]}"


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--ones",)], ids=["compiled", "arguments of one"])
def test_kernels_compile_for_cuda(options):
    script = Path(__file__).with_name("compile_triton.py")
    done = subprocess.run([sys.executable, str(script), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
