"""Strom 2015: plus or minus tau for what lies beyond it."""

import pytest
import torch

from gradwire.coding.indices import index_entropy_bits
from gradwire.compression.sparsification.threshold import Threshold
from gradwire.core.errors import WireError
from gradwire.core.fusion import encode_feedback
from gradwire.core.key import Key
from gradwire.core.spec import Spec

KEY = Key(0)


def decoded(codec: Threshold, x: torch.Tensor) -> torch.Tensor:
    payload, _ = codec.encode(x, None, KEY)
    return codec.decode(payload, Spec.of(x), KEY)


def test_a_case_by_hand() -> None:
    x = torch.tensor([0.5, -3.0, 1.0, 0.0, 2.0, -1.0, -1.5])
    # An element that equals tau stays, as in the paper.
    assert decoded(Threshold(1.0), x).tolist() == [0.0, -1.0, 0.0, 0.0, 1.0, 0.0, -1.0]


def test_with_feedback_an_element_goes_out_in_portions_of_tau() -> None:
    codec, residual = Threshold(1.0), torch.tensor([3.5, -2.25, 0.75])
    heard = []
    for _ in range(4):
        payload, residual, _ = encode_feedback(codec, torch.zeros(3), residual, None, KEY)
        heard.append(codec.decode(payload, Spec((3,), torch.float32), KEY).tolist())
    assert heard == [[1, -1, 0], [1, -1, 0], [1, 0, 0], [0, 0, 0]]
    assert residual.tolist() == [0.5, -0.25, 0.75]


def test_one_bit_and_a_position_per_element_sent() -> None:
    x = Key(3).normal(100_000)
    payload, _ = Threshold(2.576).encode(x, None, KEY)  # one per cent of a normal vector
    count = int((x.abs() > 2.576).sum())
    least = (index_entropy_bits(x.numel(), count) + count) / 8
    assert least <= payload.nbytes <= 1.05 * least + 24
    assert payload.nbytes * 8 / count < 9.5  # 40 with float32 values


@pytest.mark.parametrize("numel", [0, 1, 255, 256, 70_000])
def test_the_count_takes_as_few_bytes_as_the_length_of_the_tensor(numel) -> None:
    payload, _ = Threshold(1.0).encode(torch.zeros(numel), None, KEY)
    count_bytes = -(-numel.bit_length() // 8)
    assert payload.parts["indices"].numel() == count_bytes  # no position takes no byte


@pytest.mark.parametrize("count", [4, 6, 255])
def test_a_false_count_is_refused(count) -> None:
    x = torch.tensor([2.0, -2.0, 0.0, 0.0, 2.0, 2.0, -2.0, 0.0])
    payload, _ = Threshold(1.0).encode(x, None, KEY)
    assert payload.parts["indices"][0] == 5
    indices = payload.parts["indices"].clone()
    indices[0] = count
    with pytest.raises(WireError):
        Threshold(1.0).decode(payload.replace(indices=indices), Spec.of(x), KEY)


def test_a_tau_beyond_half_precision_saturates() -> None:
    x = torch.tensor([65504.0, -65504.0], dtype=torch.float16)
    assert torch.isfinite(decoded(Threshold(65503.0), x)).all()


@pytest.mark.parametrize("tau", [0.0, -1.0, float("nan"), float("inf")])
def test_a_tau_that_is_no_threshold_is_refused(tau) -> None:
    with pytest.raises(ValueError, match="threshold: tau must be positive"):
        Threshold(tau)
