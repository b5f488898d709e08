"""fp16 and bf16."""

import math

import pytest
import torch

from gradwire.compression.layerwise import Layerwise
from gradwire.compression.quantization.bf16 import BF16
from gradwire.compression.quantization.fp16 import FP16
from gradwire.compression.sparsification.randomk import RandomK
from gradwire.compression.sparsification.topk import TopK
from gradwire.core.codec import Codec, merge
from gradwire.core.key import Key
from gradwire.core.spec import Spec


def decoded(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    payload, _ = codec.encode(x, None, Key(0))
    return codec.decode(payload, Spec.of(x), Key(0))


def test_fp16_saturates_instead_of_becoming_infinite() -> None:
    x = torch.tensor([65504.0, 65519.0, 65520.0, 1e5, 3e38, -1e5, -3e38])
    assert decoded(FP16(), x).tolist() == [65504.0] * 5 + [-65504.0] * 2


def test_bf16_saturates_instead_of_becoming_infinite() -> None:
    largest = torch.finfo(torch.bfloat16).max
    x = torch.tensor([3.4e38, -3.4e38, 1e300, -1e300], dtype=torch.float64)
    assert decoded(BF16(), x).tolist() == [largest, -largest, largest, -largest]
    x = torch.tensor([torch.finfo(torch.float32).max])
    assert decoded(BF16(), x).tolist() == [largest]


def test_the_largest_half_survives_the_coarser_bf16() -> None:
    x = torch.tensor([65504.0, -65504.0, 1.0], dtype=torch.float16)
    assert decoded(BF16(), x).tolist() == [65504.0, -65504.0, 1.0]  # 65536 would be infinite
    assert decoded(FP16() >> BF16(), x.float()).tolist() == [65504.0, -65504.0, 1.0]


@pytest.mark.parametrize(("codec", "bits"), [(FP16(), 11), (BF16(), 8)], ids=["fp16", "bf16"])
def test_rounding_is_to_nearest_even(codec, bits) -> None:
    ulp = 2.0 ** (1 - bits)
    x = torch.tensor([1 + ulp / 2, 1 + 1.5 * ulp, 1 + 0.51 * ulp, 1 + 0.49 * ulp, -1 - ulp / 2])
    assert decoded(codec, x).tolist() == [1.0, 1 + 2 * ulp, 1 + ulp, 1.0, -1.0]


@pytest.mark.parametrize(("codec", "bits"), [(FP16(), 11), (BF16(), 8)], ids=["fp16", "bf16"])
def test_the_error_of_each_element_is_at_most_half_a_unit_in_the_last_place(codec, bits) -> None:
    x = Key(3).normal(10_000)
    errors = (decoded(codec, x) - x).abs() / x.abs()
    errors = errors[x.abs() > 2.0**-14]  # the normal range of fp16
    assert float(errors.max()) <= 2.0**-bits
    assert float(errors.max()) > 0.95 * 2.0**-bits  # the bound is tight


@pytest.mark.parametrize("codec", [FP16(), BF16()], ids=repr)
@pytest.mark.parametrize("numel", [0, 1, 7, 1000, 100_000])
def test_the_wire_carries_two_bytes_an_element(codec, numel) -> None:
    payload, _ = codec.encode(torch.zeros(numel), None, Key(0))
    assert 2 * numel < payload.nbytes <= 2 * numel + 24


def test_an_overflowing_sum_stays_visible() -> None:
    a, _ = FP16().encode(torch.tensor([65504.0]), None, Key(0))
    total = FP16().decode(merge(FP16(), a, a), Spec((1,), torch.float32), Key(0))
    assert math.isinf(float(total))  # not some large number that looks like a gradient


def test_fp16_states_the_range_in_which_its_guarantee_holds() -> None:
    spec = Spec((100,), torch.float32)
    assert FP16().guarantee(spec).within == (2.0**-14, 65504.0)
    assert FP16().guarantee(Spec((100,), torch.float16)).within is None
    assert BF16().guarantee(spec).within is None
    assert BF16().guarantee(Spec((100,), torch.float64)).within is not None
    chain = TopK(0.1) >> FP16()
    assert chain.guarantee(spec).within == (2.0**-14, 65504.0)
    assert Layerwise(chain).guarantee(spec).within == (2.0**-14, 65504.0)
    # Values are multiples of the elements: in which range the elements lie says nothing of them.
    scaled = (RandomK(0.1, unbiased=True) >> FP16()).guarantee(spec)
    assert (scaled.omega, scaled.delta, scaled.within) == (None, None, None)


@pytest.mark.parametrize("magnitude", [1e-8, 1e6])
def test_beyond_its_range_fp16_loses_more_than_it_states(magnitude) -> None:
    x = torch.full((100,), magnitude)
    lost = (decoded(FP16(), x) - x).norm() ** 2 / x.norm() ** 2
    assert lost > 0.1 > 1 - FP16().guarantee(Spec.of(x)).delta
