"""The pure layers against torch's own, and what is refused in their place."""

import pytest
import torch
from torch import nn

from gradwire.core.key import Key
from gradwire.training.layers import KeyedDropout, PureBatchNorm, purify

SHAPES = {nn.BatchNorm1d: (6, 3), nn.BatchNorm2d: (4, 3, 5, 5), nn.BatchNorm3d: (2, 3, 2, 3, 2)}


@pytest.mark.parametrize("use_torch_kernel", [True, False])
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": 0.3}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}],
    ids=str,
)
def test_batch_norm_equals_torch(
    use_torch_kernel: bool, kind: type[nn.BatchNorm2d], options: dict[str, object]
) -> None:
    norm = kind(3, **options).double()  # type: ignore[arg-type]
    pure = purify(norm)
    assert isinstance(pure, PureBatchNorm)
    assert pure.state_dict().keys() == norm.state_dict().keys()
    pure.use_torch_kernel = use_torch_kernel
    shape = SHAPES[kind]  # type: ignore[index]
    for step in range(4):
        x = 3.0 + 2.0 * Key(0).at(step).normal(torch.Size(shape).numel()).double().view(shape)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        outputs, expected = pure(a), norm(b)
        torch.testing.assert_close(outputs, expected)
        outputs.square().sin().sum().backward()
        expected.square().sin().sum().backward()
        torch.testing.assert_close(a.grad, b.grad)
        for name, value in norm.state_dict().items():
            torch.testing.assert_close(pure.state_dict()[name], value)
    torch.testing.assert_close(pure.eval()(x), norm.eval()(x))


def test_batch_norm_of_one_value_is_refused() -> None:
    pure = purify(nn.BatchNorm1d(3))
    assert isinstance(pure, PureBatchNorm)
    for pure.use_torch_kernel in (True, False):
        with pytest.raises(ValueError, match=r"more than (one|1) value"):
            pure(torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"3 channels got inputs of shape \(2, 4\)"):
        pure(torch.zeros(2, 4))


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_masks_keep_the_mean(probability: float) -> None:
    mask = KeyedDropout(probability, whole_channels=False).mask(Key(3).uniform(100_000))
    kept = mask[mask != 0]
    assert abs(len(kept) / 100_000 - (1 - probability)) < 0.01
    assert torch.allclose(kept, torch.tensor(1 / (1 - probability) if probability < 1 else 0.0))


def test_a_layer_used_twice_stays_one_layer() -> None:
    norm, drop = nn.BatchNorm1d(2), nn.Dropout(0.5)
    module = nn.Sequential(norm, drop, nn.Sequential(drop, norm))
    pure = purify(module)
    assert isinstance(pure, nn.Sequential)
    assert pure[0] is pure[2][1]
    assert pure[1] is pure[2][0]
    assert isinstance(pure[0], PureBatchNorm)
    assert isinstance(pure[1], KeyedDropout)
    assert module[0] is norm  # the user's module is not touched


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.SyncBatchNorm(3), "SyncBatchNorm communicates"),
        (nn.MultiheadAttention(4, 2, dropout=0.1), r"MultiheadAttention\(dropout=0.1\)"),
    ],
)
def test_layers_that_cannot_be_pure_are_refused(layer: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        purify(nn.Sequential(layer))


def test_lstm_with_dropout_is_refused() -> None:
    with torch.random.fork_rng(devices=[]):
        lstm = nn.LSTM(2, 2, num_layers=2, dropout=0.5)
    with pytest.raises(ValueError, match=r"put nn.Dropout modules between layers"):
        purify(lstm)
