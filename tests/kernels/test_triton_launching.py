"""Launches that pass by Triton's JIT: they start what the JIT would, and leave the rest to it."""

from itertools import combinations
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction, create_function_from_signature

from gradwire.kernels.triton import _launching
from gradwire.kernels.triton._common import launch as common_launch

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator (CUDA)")


def _function(x, out, n, size, factor, BLOCK: tl.constexpr, FLAG: tl.constexpr):
    pass


def jit(**options):
    """The JIT's own kernel, though others are interpreted here."""
    return JITFunction(_function, do_not_specialize=["n"], **options)


class OnCuda(torch.Tensor):
    """A tensor that says that it is on a GPU, at an address of its own."""

    is_cuda = True
    address = 0

    def get_device(self):
        return 3

    def data_ptr(self):
        return self.address


def on_cuda(address=4096, dtype=torch.float32):
    x = torch.empty(4, dtype=dtype).as_subclass(OnCuda)
    x.address = address
    return x


def arguments(x=4096, out=8192, n=5, size=32, factor=0.5, dtype=torch.float32):
    return on_cuda(x, dtype), on_cuda(out), n, size, factor


# What the JIT compiles apart, or not.
ARGUMENTS = [
    {},
    {"x": 64},
    {"x": 4100},
    {"out": 8200},
    {"x": 4104, "out": 8196},
    {"dtype": torch.float16},
    {"dtype": torch.int32},
    *({"n": n} for n in (0, 1, 16, 2**31 - 1, 2**31, 2**35, 2**63, -(2**31), -(2**31) - 1)),
    *({"size": n} for n in (0, 1, 2, 17, 48, 2**31 - 1, 2**31, 2**31 + 1, 2**63, 2**63 + 1, -16)),
    {"factor": 1.0},
    {"factor": 16.0},
]


@pytest.mark.parametrize(
    "options", [{}, {"do_not_specialize_on_alignment": ["x", "size"]}], ids=str
)
def test_keys_differ_if_and_only_if_those_of_the_jit_do(options):
    from triton.backends.nvidia.compiler import CUDABackend

    kernel = jit(**options)
    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    starter = _launching.Starter(kernel, arguments())
    assert starter.direct
    keys = []
    for case in ARGUMENTS:
        given = arguments(**case)
        for constants in ({"BLOCK": 64, "FLAG": False}, {"BLOCK": 32, "FLAG": False}):
            found = bind(*given, **constants)
            of_jit = str((found[1], found[2], found[-1]))
            passed, key = starter.describe(0, given, constants)
            assert passed == (given[0].address, given[1].address, *given[2:])
            keys.append((key, of_jit, case))
    for (key, of_jit, case), (other, other_of_jit, other_case) in combinations(keys, 2):
        assert (key == other) == (of_jit == other_of_jit), (case, other_case)


def test_keys_differ_by_device_and_option():
    starter = _launching.Starter(jit(), arguments())
    keys = {
        starter.describe(device, arguments(), {"BLOCK": 64, **options})[1]
        for device in (0, 1)
        for options in ({}, {"num_warps": 4}, {"num_warps": 8}, {"num_stages": 4})
    }
    assert len(keys) == 8


class Made(CompiledKernel):
    """A compiled kernel that counts its launches."""

    run = function = packed_metadata = None  # properties and attributes of a real one

    def __init__(self, name):
        self.launches = []
        self.run = lambda *given: self.launches.append(given)
        self.function, self.packed_metadata = f"function of {name}", f"metadata of {name}"

    def __del__(self):
        pass


@pytest.fixture
def compiled(monkeypatch):
    """A kernel of the JIT, and what it has compiled so far."""
    made = []
    kernel = jit()

    def run(*given, grid, warmup, **options):
        made.append(Made(len(made)))
        made[-1].of_jit = given, grid, options
        return made[-1]

    kernel.run = run
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 3, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda at: 70 + at, raising=False)
    monkeypatch.setattr(_launching, "_backend", lambda: "cuda")
    return kernel, made


def test_the_second_launch_calls_what_the_first_compiled(compiled):
    kernel, made = compiled
    for n in (5, 6):
        common_launch(kernel, (7, 2), *arguments(n=n), BLOCK=64, FLAG=True, num_warps=8)
    (only,) = made
    given, grid, options = only.of_jit
    assert (given[2], grid) == (5, (7, 2))
    assert options == {"BLOCK": 64, "FLAG": True, "num_warps": 8, "enable_fp_fusion": False}
    ((*front, x, out, n, size, factor, block, flag),) = only.launches
    assert front == [7, 2, 1, 73, "function of 0", "metadata of 0", None, None, None]
    assert (x, out, n, size, factor, block, flag) == (4096, 8192, 6, 32, 0.5, 64, True)


def test_triton_3_2_gets_no_constants(compiled, monkeypatch):
    kernel, made = compiled
    monkeypatch.setattr(triton, "__version__", "3.2.0")
    for _ in range(2):
        common_launch(kernel, (7,), *arguments(), BLOCK=64, FLAG=True)
    assert made[0].launches[0][9:] == (4096, 8192, 5, 32, 0.5)


@pytest.mark.parametrize("case", [{"x": 4100}, {"dtype": torch.int32}, {"size": 33}], ids=str)
def test_another_alignment_or_dtype_is_compiled_apart(compiled, case):
    kernel, made = compiled
    for given in (arguments(), arguments(**case), arguments(), arguments(**case)):
        common_launch(kernel, (1,), *given, BLOCK=64, FLAG=True)
    assert [len(each.launches) for each in made] == [1, 1]


def test_no_programs_are_no_launch(compiled):
    kernel, made = compiled
    common_launch(kernel, (3, 0), *arguments(), BLOCK=64, FLAG=True)
    assert not made


def left_to_jit(kernel, made, *given, **options):
    count = len(made)
    for _ in range(2):
        common_launch(kernel, (1,), *given, **options)
    assert len(made) == count + 2
    assert not any(each.launches for each in made[count:])


CONSTANTS = {"BLOCK": 64, "FLAG": True}


def test_other_kinds_of_arguments_are_left_to_the_jit(compiled):
    kernel, made = compiled
    common_launch(kernel, (1,), *arguments(), **CONSTANTS)
    x, out, n, size, factor = arguments()
    for given in (
        (None, out, n, size, factor),
        (x, out, n, size, 1),
        (x, out, True, size, factor),
        (x, out, float(n), size, factor),
        (torch.zeros(4), out, n, size, factor),  # on the CPU
    ):
        left_to_jit(kernel, made, *given, **CONSTANTS)


def test_constants_by_position_are_left_to_the_jit(compiled):
    left_to_jit(*compiled, *arguments(), 64, FLAG=True)


@pytest.mark.parametrize("version", ["3.1.0", "3.10.0", "4.0.0+git1"])
def test_unknown_versions_are_left_to_the_jit(compiled, monkeypatch, version):
    monkeypatch.setattr(triton, "__version__", version)
    left_to_jit(*compiled, *arguments(), **CONSTANTS)


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("chained", [False, True])
def test_whoever_observes_launches_sees_all(compiled, monkeypatch, hook, chained):
    kernel, made = compiled
    for _ in range(2):
        common_launch(kernel, (1,), *arguments(), **CONSTANTS)
    assert len(made) == 1
    seen = SimpleNamespace(calls=[print]) if chained else print
    monkeypatch.setattr(_launching._HOOKS, hook, seen)
    left_to_jit(kernel, made, *arguments(), **CONSTANTS)
    monkeypatch.setattr(_launching._HOOKS, hook, SimpleNamespace(calls=[]) if chained else None)
    common_launch(kernel, (1,), *arguments(), **CONSTANTS)
    assert len(made[0].launches) == 2
    kernel.pre_run_hooks.append(print)
    left_to_jit(kernel, made, *arguments(), **CONSTANTS)


def test_other_backends_are_left_to_the_jit(compiled, monkeypatch):
    monkeypatch.setattr(_launching, "_backend", lambda: "hip")
    left_to_jit(*compiled, *arguments(), **CONSTANTS)


@needs_cuda
def test_on_cuda_launches_follow_alignment_dtype_and_stream():
    from gradwire.kernels.triton.strata import _values, strata_values

    values = torch.randn(2000, device="cuda")
    for offset in (0, 1, 0, 1, 4, 3):
        x = values[offset : offset + 1000]
        found = strata_values(x, 1000, 1, (2, 3, 4), False)  # strata of one element each
        assert torch.equal(found, x)
    keys = _launching._starters[id(_values)].compiled
    assert len({key for key in keys if key[0] == torch.cuda.current_device()}) >= 2
    stream = torch.cuda.Stream()
    x = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        x += 1
        found = strata_values(x, 1 << 20, 1, (2, 3, 4), False)
    stream.synchronize()
    assert bool((found == 1).all())


@needs_cuda
def test_on_cuda_a_tensor_of_the_cpu_is_refused():
    from gradwire.kernels.triton.strata import _values, strata_values

    x = torch.arange(1000.0)
    strata_values(x.cuda(), 1000, 1, (2, 3, 4), False)
    with pytest.raises(ValueError, match="cannot be accessed"):
        common_launch(_values, (1,), x, x.cuda(), 1000, 1000, *range(5), SCALED=False, BLOCKS=256)
