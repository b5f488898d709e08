"""Every network: notation, output shapes, parameter counts, losses, errors for wrong shapes."""

import math

import pytest
import torch

from gradwire.core.errors import NotationError
from gradwire.experiment.run.registries import MODELS
from gradwire.models.base import Model, build_seeded
from gradwire.models.char_lstm import CharLSTM
from gradwire.models.mlp import MLP
from gradwire.models.mnist_cnn import MnistCNN
from gradwire.models.nanogpt import NanoGPT
from gradwire.models.resnet20 import ResNet20
from gradwire.testing import training_laws

# model, input shape, classes, number of parameters counted by hand
CASES = [
    (MLP(), (1, 8, 8), 10, 64 * 128 + 128 + 128 * 64 + 64 + 64 * 10 + 10),
    (MLP((32,)), (5,), 3, 5 * 32 + 32 + 32 * 3 + 3),
    (MLP(()), (2, 2), 3, 4 * 3 + 3),
    (MnistCNN(), (1, 28, 28), 10, 260 + 5020 + 320 * 50 + 50 + 510),
    (ResNet20(), (3, 32, 32), 10, 269_722),
    (ResNet20(), (1, 8, 8), 10, 269_722 - 2 * 16 * 9),
    (CharLSTM(), (12,), 80, 80 * 8 + 4 * 256 * (8 + 256 + 2) + 4 * 256 * (512 + 2) + 257 * 80),
    (NanoGPT(), (16,), 65, 65 * 128 + 16 * 128 + 4 * (12 * 128**2 + 13 * 128) + 256 + 65 * 128),
    (
        NanoGPT(layers=2, width=32, tie_weights=True),
        (16,),
        65,
        65 * 32 + 16 * 32 + 2 * (12 * 32**2 + 13 * 32) + 64,
    ),
]
IDS = [f"{case[0]}-{case[1]}" for case in CASES]


@pytest.mark.parametrize(("model", "shape", "num_classes", "count"), CASES, ids=IDS)
def test_shapes_and_parameter_counts(
    model: Model, shape: tuple[int, ...], num_classes: int, count: int
) -> None:
    training_laws.outputs_are_logits_of_every_target(model, shape, num_classes)
    module = build_seeded(model, shape, num_classes, seed=0)
    assert sum(parameter.numel() for parameter in module.parameters()) == count


@pytest.mark.parametrize(("model", "shape", "num_classes", "count"), CASES, ids=IDS)
def test_an_untrained_network_knows_nothing(
    model: Model, shape: tuple[int, ...], num_classes: int, count: int
) -> None:
    training_laws.an_untrained_network_knows_nothing(model, shape, num_classes)


def test_text_predicts_forward_only() -> None:
    for model in (CharLSTM(), NanoGPT()):
        module = build_seeded(model, (12,), 65, seed=0)
        text, _ = training_laws.example_batch((12,), 65)
        changed = text.clone()
        changed[:, 7:] = (changed[:, 7:] + 1) % 65
        before, after = module(text), module(changed)
        torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-6)
        assert (before[:, 7:] - after[:, 7:]).abs().max() > 1e-3


def test_nanogpt_takes_shorter_texts_only() -> None:
    module = build_seeded(NanoGPT(layers=1, width=16), (8,), 65, seed=0)
    assert module(torch.zeros(1, 5, dtype=torch.int64)).shape == (1, 5, 65)
    with pytest.raises(ValueError, match="built for 8 positions, got a text of 9"):
        module(torch.zeros(1, 9, dtype=torch.int64))


def test_residual_shortcut_is_option_a() -> None:
    # With the last norms at zero a block is its shortcut: subsampled, channels padded by zeros.
    module = build_seeded(ResNet20(), (3, 32, 32), 10, seed=0)
    block = module.get_submodule("blocks.3")  # 16 -> 32 channels, stride two
    torch.nn.init.zeros_(block.get_parameter("bn2.weight"))
    x = torch.arange(2 * 16 * 8 * 8).view(2, 16, 8, 8) / 100.0
    y = block(x)
    torch.testing.assert_close(y[:, 8:24], x[:, :, ::2, ::2])
    assert not y[:, :8].any()
    assert not y[:, 24:].any()


def test_loss_and_correct_by_hand() -> None:
    outputs = torch.tensor([[[2.0, 0.0], [0.0, 0.0]], [[0.0, 1.0], [3.0, 0.0]]])  # [2, 2, 2]
    targets = torch.tensor([[0, 1], [1, 1]])
    expected = [
        math.log1p(math.exp(-2)),
        math.log(2),
        math.log1p(math.exp(-1)),
        math.log1p(math.exp(3)),
    ]
    assert float(MLP().loss(outputs, targets)) == pytest.approx(sum(expected) / 4)
    assert int(MLP().correct(outputs, targets)) == 2  # a tie goes to the first class
    log_probabilities = torch.log(torch.tensor([[0.25, 0.75], [0.5, 0.5]]))
    loss = MnistCNN().loss(log_probabilities, torch.tensor([1, 0]))
    assert float(loss) == pytest.approx(-(math.log(0.75) + math.log(0.5)) / 2)


def test_seeded_builds_repeat_and_leave_the_global_generator_alone() -> None:
    training_laws.seeded_builds_repeat_and_leave_the_global_generator_alone(MLP(), (8,), 3)


@pytest.mark.parametrize(
    ("model", "shape", "message"),
    [
        (MLP(), (), r"mlp needs a non-empty input shape"),
        (MnistCNN(), (3, 32, 32), r"mnist_cnn needs images of 28 x 28.*got \(3, 32, 32\)"),
        (MnistCNN(), (28, 28), r"mnist_cnn needs images of 28 x 28"),
        (ResNet20(), (64,), r"resnet20 needs images.*got \(64,\)"),
        (CharLSTM(), (1, 28, 28), r"char_lstm needs text.*got \(1, 28, 28\)"),
        (NanoGPT(), (3, 32, 32), r"nanogpt needs text"),
    ],
)
def test_wrong_shapes_are_refused(model: Model, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model.build(shape, 10)


def test_notation_finds_every_model_by_its_file_name() -> None:
    assert MODELS.builtin_names() == ["char_lstm", "mlp", "mnist_cnn", "nanogpt", "resnet20"]
    for model, *_ in CASES:
        assert MODELS.parse(repr(model)) == model
    assert repr(NanoGPT(2, width=64)) == "nanogpt(2, width=64)"
    with pytest.raises(NotationError, match="heads divide"):
        MODELS.parse("nanogpt(heads=3)")
    with pytest.raises(NotationError, match="widths of at least 1"):
        MODELS.parse("mlp((0,))")


def test_a_character_model_that_predicts_the_last_only() -> None:
    """Its logits, loss and counts are those that one for all positions has at the last."""
    symbols = torch.arange(24).view(2, 12) % 20
    targets = (symbols + 1) % 20
    everywhere, last = CharLSTM(hidden=16), CharLSTM(hidden=16, predicts="last")
    modules = [build_seeded(model, (12,), 20, seed=0) for model in (everywhere, last)]
    whole, end = (module(symbols) for module in modules)
    assert end.shape == (2, 20)
    torch.testing.assert_close(whole[:, -1], end)
    torch.testing.assert_close(
        last.loss(end, targets), torch.nn.functional.cross_entropy(end, targets[:, -1])
    )
    assert last.count(targets) == 2
    assert everywhere.count(targets) == 24
    right = int((end.argmax(-1) == targets[:, -1]).sum())
    assert int(last.correct(end, targets)) == right
    with pytest.raises(ValueError, match='predicts "all" or "last"'):
        CharLSTM(predicts="first")  # type: ignore[arg-type]
