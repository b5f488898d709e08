"""8-bit floats: the largest of a block is the largest of the format, the rest rounds to nearest."""

import pytest
import torch

from gradwire.compression.quantization.fp8 import FP8
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.spec import Spec

KEY = Key(0)


def decoded(codec: FP8, x: torch.Tensor) -> torch.Tensor:
    payload, _ = codec.encode(x, None, KEY)
    return codec.decode(payload, Spec.of(x), KEY)


def test_a_case_by_hand() -> None:
    # With the largest at 448 nothing is scaled. e4m3 has eight steps from one power of two to
    # the next: 17 lies halfway between 16 and 18 and goes to the even one; 2^-9 is the smallest.
    x = torch.tensor([448.0, -17.0, 18.9, 0.0, 2.0**-9, 2.0**-11])
    assert decoded(FP8(), x).tolist() == [448.0, -16.0, 18.0, 0.0, 2.0**-9, 0.0]
    # e5m2 has four.
    y = torch.tensor([57344.0, -18.0, 21.0, 2.0**-16])
    assert decoded(FP8("e5m2"), y).tolist() == [57344.0, -16.0, 20.0, 2.0**-16]


def test_the_bytes_of_a_case_by_hand() -> None:
    payload, _ = FP8().encode(torch.tensor([448.0, -448.0, 1.0, 0.0]), None, KEY)
    assert payload.parts["scale"].tolist() == [448.0]
    # Sign, four bits of exponent with bias 7, three of mantissa.
    assert payload.parts["values"].tolist() == [0x7E, 0xFE, 7 << 3, 0]


@pytest.mark.parametrize(("name", "half_ulp"), [("e4m3", 2.0**-4), ("e5m2", 2.0**-3)])
def test_normal_numbers_move_by_less_than_half_a_unit(name, half_ulp) -> None:
    x = Key(1).normal(10_000).double()
    found = decoded(FP8(name), x)
    largest = x.abs().max()
    normal = x.abs() > largest * 2.0**-14
    assert ((found - x).abs()[normal] <= half_ulp * x.abs()[normal]).all()
    assert float((found - x).abs()[~normal].max()) <= float(largest) * 2.0**-14 * half_ulp


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
@pytest.mark.parametrize("exponent", [-60, 0, 60])
def test_the_contraction_holds_for_wide_ranges(name, exponent) -> None:
    x = Key(2).normal(4096) * 2.0 ** (Key(3).uniform(4096) * 40 - 20 + exponent)
    codec = FP8(name)
    lost = float((decoded(codec, x).double() - x.double()).square().sum())
    delta = codec.guarantee(Spec.of(x)).delta
    assert lost <= (1 - delta) * float(x.double().square().sum())
    assert 1 - delta == pytest.approx(2.0**-8 if name == "e4m3" else 2.0**-6, rel=1e-5)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_the_largest_of_each_block_is_exact(name) -> None:
    x = Key(4).normal(512).reshape(8, 64) * 10.0 ** torch.arange(-4.0, 4.0)[:, None]
    found = decoded(FP8(name, block=64), x)
    top = x.abs().argmax(dim=1, keepdim=True)
    assert torch.allclose(found.gather(1, top), x.gather(1, top), rtol=1e-6)


@pytest.mark.parametrize("x", [1e-44, 3.4e38, -1e-38])
def test_extreme_blocks_neither_vanish_nor_overflow(x) -> None:
    assert torch.allclose(decoded(FP8(), torch.full((9,), x)), torch.full((9,), x), rtol=1e-6)


def test_half_precision_never_decodes_to_infinity() -> None:
    x = torch.tensor([65504.0, -65504.0, 6e-8], dtype=torch.float16)
    assert decoded(FP8(), x).tolist() == [65504.0, -65504.0, 0.0]


@pytest.mark.parametrize("numel", [0, 1, 127, 1000, 100_001])
def test_the_wire_carries_a_byte_an_element_and_a_scale_per_block(numel) -> None:
    payload, _ = FP8().encode(torch.ones(numel), None, KEY)
    assert numel <= payload.nbytes <= numel + 4 * -(-numel // 128) + 24


@pytest.mark.parametrize(("name", "byte"), [("e4m3", 0x7F), ("e4m3", 0xFF), ("e5m2", 0x7C)])
def test_a_byte_that_is_no_number_is_refused(name, byte) -> None:
    codec = FP8(name)
    payload, _ = codec.encode(torch.ones(4), None, KEY)
    crafted = payload.replace(values=torch.full((4,), byte, dtype=torch.uint8))
    with pytest.raises(WireError, match="no finite number"):
        codec.decode(crafted, Spec((4,), torch.float32), KEY)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0])
def test_a_scale_that_is_none_is_refused(scale) -> None:
    payload, _ = FP8().encode(torch.ones(4), None, KEY)
    crafted = payload.replace(scale=torch.tensor([scale]))
    with pytest.raises(WireError, match="scale"):
        FP8().decode(crafted, Spec((4,), torch.float32), KEY)


def test_parameters_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match='fp8: format is "e4m3" or "e5m2"'):
        FP8("e3m4")
    with pytest.raises(ValueError, match="fp8: block"):
        FP8(block=0)
