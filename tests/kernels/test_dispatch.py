"""Which backend runs: by device, availability and GRADWIRE_KERNELS."""

import os
import subprocess
import sys

import pytest
import torch

from gradwire import kernels
from gradwire.core.errors import GradwireWarning
from gradwire.kernels import _dispatch
from gradwire.kernels.native import _library
from sampling import slow

DRAW = """
import torch
from gradwire import kernels
for _ in range(2):
    kernels.philox_words(0, (0, 0, 0), 4, torch.device("cpu"))
print(kernels.backend())
"""
WITHOUT_LIBRARY = """
from gradwire.kernels.native import _library
_library.EXTENSION_SUFFIXES.clear()
"""


def run(code: str, wish: str | None) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "GRADWIRE_KERNELS"}
    if wish is not None:
        environment["GRADWIRE_KERNELS"] = wish
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    ("wish", "answer"), [slow(None, "native"), slow("native", "native"), ("reference", "reference")]
)
def test_the_wish_is_followed_silently(wish, answer):
    done = run(DRAW, wish)
    assert (done.stdout.strip(), done.stderr) == (answer, "")


def test_without_the_library_the_reference_runs_and_says_so_once():
    done = run(WITHOUT_LIBRARY + DRAW, None)
    assert done.stdout.strip() == "reference"
    assert done.stderr.count("GradwireWarning") == 1
    assert "the C library was not built" in done.stderr
    assert "where there is a C compiler" in done.stderr


@pytest.mark.slow
def test_without_the_library_the_wish_for_the_reference_is_silent():
    done = run(WITHOUT_LIBRARY + DRAW, "reference")
    assert (done.stdout.strip(), done.stderr) == ("reference", "")


@pytest.mark.slow
def test_without_the_library_the_wish_for_native_is_an_error():
    done = run(WITHOUT_LIBRARY + DRAW, "native")
    assert done.returncode != 0
    assert "ValueError: GRADWIRE_KERNELS is 'native' but the C library was not built" in (
        done.stderr
    )


def test_an_unknown_wish_lists_the_known_ones(monkeypatch):
    monkeypatch.setenv("GRADWIRE_KERNELS", "cuda")
    with pytest.raises(ValueError, match="'cuda'; it can be 'native', 'reference', 'triton'"):
        kernels.pack_signs(torch.zeros(3))


def test_a_library_of_another_version_is_not_used(monkeypatch):
    monkeypatch.setattr(_library, "_VERSION", -1)
    with pytest.raises(_library.LibraryError, match=r"of version .*, not -1|not built"):
        _library._open()


def test_other_devices_run_the_reference(monkeypatch):
    monkeypatch.setenv("GRADWIRE_KERNELS", "native")
    assert _dispatch.pick(torch.device("xpu"), max, min, lambda: sum) is min
    assert _dispatch.pick(torch.device("cuda"), max, min) is min


def test_cuda_runs_triton_unless_the_reference_is_wished_for(monkeypatch):
    pytest.importorskip("triton")
    device = torch.device("cuda")
    monkeypatch.delenv("GRADWIRE_KERNELS", raising=False)
    assert _dispatch.pick(device, max, min, lambda: sum) is sum
    monkeypatch.setenv("GRADWIRE_KERNELS", "reference")
    assert _dispatch.pick(device, max, min, lambda: sum) is min


def test_triton_runs_on_the_cpu_only_if_it_is_interpreted(monkeypatch):
    monkeypatch.setenv("GRADWIRE_KERNELS", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert _dispatch.runs_triton(torch.device("cpu"))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert not _dispatch.runs_triton(torch.device("cpu"))


def test_without_triton_the_reference_runs_and_says_so_once(monkeypatch):
    def missing() -> None:
        raise _dispatch.TritonError("triton cannot be imported (no such module)")

    monkeypatch.setattr(_dispatch, "_import_triton", missing)
    monkeypatch.delenv("GRADWIRE_KERNELS", raising=False)
    _dispatch._warn_once.cache_clear()
    with pytest.warns(GradwireWarning, match="triton cannot be imported .*; install triton"):
        assert _dispatch.pick(torch.device("cuda"), max, min, lambda: sum) is min
    monkeypatch.setenv("GRADWIRE_KERNELS", "triton")
    with pytest.raises(ValueError, match="GRADWIRE_KERNELS is 'triton' but triton cannot be"):
        _dispatch.runs_triton(torch.device("cuda"))


def test_one_warning_class_for_users():
    assert GradwireWarning is kernels.GradwireWarning
