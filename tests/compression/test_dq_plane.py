"""`dq` with a plane of bits in place of the trellis: when, how much better, and its bytes."""

import contextlib

import pytest
import torch

from gradwire.compression.source_coding import _dq_quantised, _dq_search
from gradwire.compression.source_coding._dq_quantised import Way, quantise
from gradwire.compression.source_coding._dq_wire import PLANE
from gradwire.compression.source_coding.dq import DQ
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.spec import Spec
from gradwire.experiment.studies.codecs import spec_of
from gradwire.experiment.studies.gradients import saved_gradients

KEY = Key(seed=5).private(0)


def measured(rate: float, x: torch.Tensor, spec: Spec) -> tuple[bool, float]:
    """Whether there was a plane, and the relative squared error at the rate."""
    codec = DQ(rate)
    payload, _ = codec.encode(x, codec.init(spec), KEY)
    bits = 8 * payload.nbytes / x.numel()
    assert 0.97 * rate <= bits <= rate
    error = codec.decode(payload, spec, KEY).double() - x.double()
    share = float(error.square().sum() / x.double().square().sum())
    return bool(payload.parts["code"][0] & PLANE), share * 4 ** (bits - rate)


@pytest.mark.few(2)
@pytest.mark.parametrize("rate", [1.5, 2.0, 3.0])
@pytest.mark.parametrize("name", ["gaussian", "laplacian", "mlp late", "nanogpt late"])
def test_it_errs_less_than_the_trellis(name, rate, monkeypatch) -> None:
    x = Key(seed=3).normal(1 << 16)
    if name == "laplacian":
        x = x.sign() * -torch.log(Key(seed=4).uniform(1 << 16) + 1e-9)
    x = saved_gradients().get(name, x)
    spec = spec_of(name, x) if name in saved_gradients() else Spec.of(x)
    is_plane, error = measured(rate, x, spec)
    monkeypatch.setattr(_dq_search, "MIN_PLANE_BITS", 99.0)
    is_other, trellis = measured(rate, x, spec)
    assert is_plane
    assert not is_other
    assert error < 0.98 * trellis
    if name == "gaussian":
        assert error < 1.075 * 4.0**-rate  # 0.31 dB; the trellis is at 0.5


@pytest.mark.few(2)
@pytest.mark.parametrize("name", sorted(saved_gradients()))
def test_the_sample_tells_which_is_better(name, monkeypatch) -> None:
    x = saved_gradients()[name]
    _, error = measured(2.0, x, spec_of(name, x))
    monkeypatch.setattr(_dq_search, "MIN_PLANE_BITS", 99.0)
    _, trellis = measured(2.0, x, spec_of(name, x))
    assert error < 1.02 * trellis


@pytest.mark.parametrize("name", ["gaussian", "mlp early", "nanogpt late"])
def test_with_a_given_step_it_takes_fewer_bits_for_the_same_error(name, monkeypatch) -> None:
    x = saved_gradients().get(name, Key(seed=3).normal(1 << 14))
    spec, codec = spec_of(name, x) if name in saved_gradients() else Spec.of(x), DQ(step=0.2)
    figures = []
    for least in (_dq_quantised.MIN_PLANE_BITS, 99.0):
        monkeypatch.setattr(_dq_quantised, "MIN_PLANE_BITS", least)
        payload, state = codec.encode(x, codec.init(spec), KEY)
        error = float((codec.decode(payload, spec, KEY) - x).square().sum())
        figures.append((bool(payload.parts["code"][0] & PLANE), payload.nbytes, error))
        payload, _ = codec.encode(x, state, KEY)  # with tables that are known
        again = float((codec.decode(payload, spec, KEY) - x).square().sum())
        assert again == pytest.approx(error, rel=0.03)
        assert payload.nbytes == pytest.approx(figures[-1][1], rel=0.01)
    (is_plane, size, error), (is_other, most, trellis) = figures
    assert is_plane
    assert not is_other
    assert size < 0.99 * most
    assert error < 1.02 * trellis


def test_low_rates_and_few_elements_have_the_trellis() -> None:
    x = Key(seed=3).normal(1 << 14)
    assert not measured(0.5, x, Spec.of(x))[0]
    assert not measured(2.0, x[:2000], Spec.of(x[:2000]))[0]


def test_the_next_vector_starts_from_the_last_one() -> None:
    x, codec = Key(seed=3).normal(1 << 15), DQ(2.0)
    spec = Spec.of(x)
    state = codec.init(spec)
    for step in range(3):
        own = x.roll(step) * 1.01**step
        payload, state = codec.encode(own, state, KEY)
        assert payload.parts["code"][0] & PLANE
        assert 1.94 <= 8 * payload.nbytes / x.numel() <= 2.0
        error = (codec.decode(payload, spec, KEY) - own).square().sum() / own.square().sum()
        assert float(error) < 0.0725


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes(dtype) -> None:
    x = Key(seed=3).normal(5000).to(dtype)
    is_plane, error = measured(2.0, x, Spec.of(x))
    assert is_plane
    assert error < 0.075


def test_bytes_do_not_depend_on_the_backend(monkeypatch) -> None:
    x, shapes, codes = Key(seed=8).normal(1300), ((13, 96), (1, 52)), []
    spec = Spec((1300,), x.dtype, tensors=(("w", 0, 1248, (13, 96)), ("b", 1248, 1300, (52,))))
    for backend in ("", "reference"):
        monkeypatch.setenv("GRADWIRE_KERNELS", backend)
        for way in (Way.PLANE_ALL, Way.PLANE_SMALL, Way.PLANE_NONE):
            code = torch.frombuffer(
                quantise(x, shapes, 0.5, None, 2, 1, way).code(), dtype=torch.uint8
            )
            heard = DQ(2.0).join({"code": code}, spec, KEY)
            assert float((heard - x).square().mean()) < 0.1
            codes.append((code, heard))
    for (code, heard), (other, also) in zip(codes[:3], codes[3:]):
        assert torch.equal(code, other)
        assert torch.equal(heard, also)


def test_forged_bytes_are_refused() -> None:
    x = Key(seed=8).normal(3000)
    tried = quantise(x, ((1, 3000),), 0.5, None, 2, 1, Way.PLANE_NONE)
    code = torch.frombuffer(tried.code(), dtype=torch.uint8)

    def decode(forged: torch.Tensor) -> torch.Tensor:
        return DQ(2.0).join({"code": forged}, Spec((3000,), torch.float32), KEY)

    assert float((decode(code) - x).square().mean()) < 0.1
    assert tried.plane is not None
    plane = tried.header  # where its rate stands
    assert torch.equal(code[plane : plane + tried.plane.numel()], tried.plane)
    signed = code.clone()
    signed[0] |= 4
    no_rate, other_rate = code.clone(), code.clone()
    no_rate[plane] = 0
    other_rate[plane] += 20
    end = plane + tried.plane.numel() // 2
    for forged in (signed, no_rate, other_rate, code[:plane], code[:end], code[:-2]):
        with pytest.raises(WireError):
            decode(forged)
    for i in range(0, code.numel(), 37):  # any value is refused or decoded, to numbers
        changed = code.clone()
        changed[i] ^= 0x55
        with contextlib.suppress(WireError):
            assert bool(torch.isfinite(decode(changed)).all())
