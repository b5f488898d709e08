"""Block floating point: integers of a few bits times a power of two per block."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradwire.compression.quantization.lowprec import LowPrec
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.spec import Spec

KEY = Key(0)


def decoded(codec: LowPrec, x: Tensor, key: Key = KEY) -> Tensor:
    payload, _ = codec.encode(x, None, key)
    return codec.decode(payload, Spec.of(x), key)


def test_a_case_by_hand() -> None:
    # Four bits hold -7 .. 7. The largest of the first block is 10, so the step is 2; that of the
    # second is 0.7, so the step is 1/8.
    x = torch.tensor([10.0, -3.1, 0.9, 5.1, 0.7, -0.3, 0.0, 0.2])
    codec = LowPrec(4, block=4, rounding="nearest")
    assert decoded(codec, x).tolist() == [10.0, -4.0, 0.0, 6.0, 0.75, -0.25, 0.0, 0.25]
    payload, _ = codec.encode(x, None, KEY)
    assert payload.parts["exponents"].tolist() == [1, -3]
    # The integers 5 and -2, moved up by 7, in the low and the high half of a byte.
    assert payload.parts["values"][0].item() == 12 | 5 << 4


def test_two_bits_are_minus_one_zero_and_one() -> None:
    x = torch.tensor([3.0, -1.9, 2.1, 0.0, -4.0])
    assert decoded(LowPrec(2, rounding="nearest"), x).tolist() == [4.0, 0.0, 4.0, 0.0, -4.0]


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_numbers_on_the_grid_are_exact(bits) -> None:
    top = 2 ** (bits - 1) - 1
    x = torch.arange(-top, top + 1).repeat(5)[:32].float() * 2.0**-7
    x[0] = top * 2.0**-7
    for rounding in ("random", "nearest"):
        assert torch.equal(decoded(LowPrec(bits, rounding=rounding), x), x)


@given(
    st.lists(st.floats(-1e6, 1e6).filter(lambda x: x == 0 or abs(x) > 1e-9), min_size=1),
    st.sampled_from((2, 4, 8)),
    st.integers(1, 20),
)
def test_nearest_moves_by_half_a_step_and_contracts(numbers, bits, block) -> None:
    codec = LowPrec(bits, block, "nearest")
    x = torch.tensor(numbers, dtype=torch.float64)
    found = decoded(codec, x)
    top = 2 ** (bits - 1) - 1
    for own, other in zip(x.split(block), found.split(block)):
        assert float((own - other).abs().max()) <= float(own.abs().max()) / top * (1 + 1e-12)
    energy = float(x.square().sum())
    delta = codec.guarantee(Spec.of(x)).delta
    assert float((found - x).square().sum()) <= (1 - delta) * energy * (1 + 1e-12)


@pytest.mark.few
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_at_random_the_mean_is_the_tensor(bits) -> None:
    x, num_steps = Key(3).normal(64).double(), 1000
    codec = LowPrec(bits)
    found = torch.stack([decoded(codec, x, Key(4).at(step)) for step in range(num_steps)])
    error = (found.mean(dim=0) - x).abs()
    # The standard deviation of one draw is at most half a step.
    step = 2 * float(x.abs().max()) / (2 ** (bits - 1) - 1)
    assert float(error.max()) <= 6 * step / 2 / math.sqrt(num_steps)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("block", [1, 8, 512])
def test_the_variance_stays_below_the_guarantee(bits, block) -> None:
    codec = LowPrec(bits, block)
    for x in (Key(2).normal(8192), torch.full((8192,), 0.51), Key(2).normal(8192) ** 5):
        error = float((decoded(codec, x) - x).square().sum() / x.square().sum())
        assert error <= 1.2 * codec.guarantee(Spec.of(x)).omega


@pytest.mark.parametrize(("bits", "packed"), [(2, 1.6), (4, 4), (8, 8)])
@pytest.mark.parametrize("numel", [0, 1, 33, 1000, 100_001])
def test_the_wire_carries_the_bits_and_a_byte_per_block(bits, packed, numel) -> None:
    payload, _ = LowPrec(bits).encode(torch.ones(numel), None, KEY)
    assert payload.nbytes <= math.ceil(packed * numel / 8) + -(-numel // 32) + 16


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_extremes_neither_overflow_nor_turn_into_nan(bits) -> None:
    codec = LowPrec(bits)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        info = torch.finfo(dtype)
        x = torch.tensor([info.max, -info.max, 0.0, info.tiny], dtype=dtype)
        assert torch.isfinite(decoded(codec, x)).all()
        assert torch.isfinite(decoded(codec, x[2:])).all()
    tiny = torch.tensor([1e-45, 0.0])
    assert torch.isfinite(decoded(codec, tiny)).all()


def test_exponents_that_no_step_has_are_refused() -> None:
    x = torch.ones(9, dtype=torch.float64)
    codec = LowPrec(8)
    payload, _ = codec.encode(x, None, KEY)
    for exponent in (-1030, 1024, 32767, -32768):
        crafted = payload.replace(exponents=torch.tensor([exponent], dtype=torch.int16))
        with pytest.raises(WireError, match="exponents"):
            codec.decode(crafted, Spec.of(x), KEY)


def test_a_symbol_beyond_the_largest_integer_is_refused() -> None:
    payload, _ = LowPrec(4).encode(torch.ones(2), None, KEY)
    crafted = payload.replace(values=torch.tensor([0xFF], dtype=torch.uint8))
    with pytest.raises(WireError, match="symbol 15"):
        LowPrec(4).decode(crafted, Spec((2,), torch.float32), KEY)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LowPrec(1),
        lambda: LowPrec(3),
        lambda: LowPrec(16),
        lambda: LowPrec(4, block=0),
        lambda: LowPrec(4, rounding="up"),
    ],
)
def test_parameters_out_of_range_are_refused(make) -> None:
    with pytest.raises(ValueError, match="lowprec"):
        make()


def test_a_step_below_what_a_byte_holds_wraps_around() -> None:
    x = torch.tensor([127.0, -64.0, 1.0, 3.0]) * 2.0**-131  # the smallest is subnormal
    codec = LowPrec(8, rounding="nearest")
    payload, _ = codec.encode(x, None, KEY)
    assert payload.parts["exponents"].tolist() == [256 - 131]
    assert torch.equal(decoded(codec, x), x)
    zeros, _ = codec.encode(torch.zeros(4), None, KEY)
    assert zeros.parts["exponents"].tolist() == [-128]
