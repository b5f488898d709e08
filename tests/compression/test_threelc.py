"""Lim et al. 2019: three values, five to a byte, and runs of zero bytes as one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradwire import kernels
from gradwire.compression.quantization.threelc import ThreeLC, _restore_runs
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.spec import Spec

KEY = Key(0)


def decoded(codec: ThreeLC, x: Tensor) -> Tensor:
    payload, _ = codec.encode(x, None, KEY)
    return codec.decode(payload, Spec.of(x), KEY)


def trits(codec: ThreeLC, x: Tensor) -> list[int]:
    return codec.encode(x, None, KEY)[0].parts["trits"].tolist()


def test_a_case_by_hand() -> None:
    x = torch.tensor([4.0, -2.5, 1.5, 0.0, -1.9, 2.1])
    assert decoded(ThreeLC(), x).tolist() == [4, -4, 0, 0, 0, 4]
    # M = 6: everything below 3 is zero, and 4 becomes 6.
    assert decoded(ThreeLC(1.5), x).tolist() == [6, 0, 0, 0, 0, 0]


def test_the_bytes_of_a_case_by_hand() -> None:
    x = torch.tensor([4.0, -4.0, 0.0, 0.0, 4.0, -4.0])
    # Trits 2 0 1 1 2 | 0 and four zeros that fill the byte up.
    assert trits(ThreeLC(), x) == [2 + 9 + 27 + 2 * 81, 3 + 9 + 27 + 81]


@pytest.mark.parametrize(
    ("num_zero_bytes", "expected"),
    [
        (0, []),
        (1, [121]),
        (2, [243]),
        (14, [255]),
        (15, [255, 121]),
        (16, [255, 243]),
        (28, [255, 255]),
        (33, [255, 255, 246]),
    ],
)
def test_runs_of_zero_bytes(num_zero_bytes, expected) -> None:
    x = torch.zeros(5 * num_zero_bytes + 10)
    x[:5] = x[-5:] = 1.0
    assert trits(ThreeLC(), x) == [242, *expected, 242]


@given(st.lists(st.tuples(st.integers(0, 242), st.integers(1, 40)), max_size=12))
def test_shortening_loses_nothing(runs) -> None:
    data = [byte for byte, length in runs for _ in range(length)]
    packed = torch.tensor([121 if byte < 150 else byte for byte in data], dtype=torch.uint8)
    short = kernels.shorten_runs(packed, 121, 14)
    assert short.numel() <= packed.numel()
    assert torch.equal(_restore_runs(short, packed.numel()), packed)


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60),
    st.sampled_from((1.0, 1.25, 1.5, 1.9)),
)
def test_the_contraction(numbers, sparsity) -> None:
    codec, x = ThreeLC(sparsity), torch.tensor(numbers, dtype=torch.float64)
    energy = float(x.square().sum())
    error = float((decoded(codec, x) - x).square().sum())
    assert error <= (1 - codec.guarantee(Spec.of(x)).delta) * energy * (1 + 1e-12)


def test_one_element_is_the_worst_case() -> None:
    x = torch.tensor([3.0], dtype=torch.float64)
    for sparsity in (1.0, 1.5, 1.75):
        codec = ThreeLC(sparsity)
        remaining = float((decoded(codec, x) - x).square().sum() / x.square().sum())
        assert remaining == pytest.approx(1 - codec.guarantee(Spec.of(x)).delta)


def test_a_larger_multiplier_sends_fewer_elements_and_bytes() -> None:
    x = Key(1).normal(10_000)
    sizes = [ThreeLC(s).encode(x, None, KEY)[0].nbytes for s in (1.0, 1.5, 1.9)]
    assert sizes == sorted(sizes, reverse=True)
    kept = [int(decoded(ThreeLC(s), x).count_nonzero()) for s in (1.0, 1.5, 1.9)]
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] >= 1


@pytest.mark.parametrize("numel", [0, 1, 4, 5, 6, 1000, 100_001])
def test_the_wire_carries_at_most_1_6_bits_an_element(numel) -> None:
    header = 24
    ones, _ = ThreeLC().encode(torch.ones(numel), None, KEY)
    assert ones.nbytes <= -(-numel // 5) + header
    zeros, _ = ThreeLC().encode(torch.zeros(numel), None, KEY)
    assert zeros.nbytes <= -(-numel // 70) + header


def test_a_gaussian_takes_less_than_a_bit() -> None:
    payload, _ = ThreeLC().encode(Key(1).normal(100_000), None, KEY)
    assert payload.nbytes * 8 < 0.6 * 100_000


def test_a_magnitude_beyond_the_range_saturates() -> None:
    x = torch.tensor([3e38, 0.0, -3e38])
    assert decoded(ThreeLC(1.5), x).tolist()[1] == 0.0
    assert torch.isfinite(decoded(ThreeLC(1.5), x)).all()
    y = torch.tensor([6e4, -6e4, 0.0], dtype=torch.float16)
    assert decoded(ThreeLC(1.5), y).tolist() == [65504.0, -65504.0, 0.0]


@pytest.mark.parametrize(
    "code",
    [
        [],
        [121] * 19,
        [121] * 21,
        [255],  # 14 bytes of 20
        [255, 255],  # 28
        [255, 247, 121],  # 21
        [255] * 20,
    ],
)
def test_runs_that_do_not_come_to_the_tensor_are_refused(code) -> None:
    payload, _ = ThreeLC().encode(torch.ones(100), None, KEY)
    crafted = payload.replace(trits=torch.tensor(code, dtype=torch.uint8))
    with pytest.raises(WireError, match="trits"):
        ThreeLC().decode(crafted, Spec((100,), torch.float32), KEY)


@pytest.mark.parametrize("code", [[255, 247], [247, 255], [121] * 20, [243] * 10])
def test_runs_that_come_to_the_tensor_are_zeros(code) -> None:
    payload, _ = ThreeLC().encode(torch.ones(100), None, KEY)
    crafted = payload.replace(trits=torch.tensor(code, dtype=torch.uint8))
    assert not ThreeLC().decode(crafted, Spec((100,), torch.float32), KEY).any()


@pytest.mark.parametrize("sparsity", [0.5, 2.0, -1.0, float("nan")])
def test_a_multiplier_out_of_range_is_refused(sparsity) -> None:
    with pytest.raises(ValueError, match="threelc: sparsity"):
        ThreeLC(sparsity)
