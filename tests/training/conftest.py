"""Networks of every kind with batches for them, in float64 so that comparisons can be tight."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from gradwire.core.key import Key
from gradwire.models.base import Model, build_seeded
from gradwire.models.char_lstm import CharLSTM
from gradwire.models.mlp import MLP
from gradwire.models.mnist_cnn import MnistCNN
from gradwire.models.nanogpt import NanoGPT
from gradwire.models.resnet20 import ResNet20
from gradwire.training.task import Batch, GradientRequest


@dataclass(frozen=True)
class Case:
    model: Model
    shape: tuple[int, ...]
    num_classes: int
    text: bool = False

    def module(self) -> nn.Module:
        return build_seeded(self.model, self.shape, self.num_classes, seed=0).double()

    def batch(self, key: Key, size: int = 4) -> Batch:
        numel = size * torch.Size(self.shape).numel()
        if self.text:
            symbols = key.child("text").integers(2 * numel, self.num_classes)
            inputs, targets = symbols.view(2, size, *self.shape)
            return inputs, targets
        inputs = key.child("inputs").normal(numel).double().view(size, *self.shape)
        return inputs, key.child("targets").integers(size, self.num_classes)

    def requests(
        self, params: Sequence[Tensor], buffers: Sequence[dict[str, Tensor]], step: int = 0
    ) -> list[GradientRequest]:
        """One request per worker, with keys and batches of its own."""
        keys = [Key(seed=5).at(step).private(rank) for rank in range(len(params))]
        return [
            GradientRequest(x, statistics, *self.batch(key), key)
            for x, statistics, key in zip(params, buffers, keys)
        ]


CASES = {
    "mlp": Case(MLP((16, 8)), (1, 8, 8), 10),
    "mnist_cnn": Case(MnistCNN(), (1, 28, 28), 10),
    "resnet20": Case(ResNet20(), (3, 8, 8), 10),
    "char_lstm": Case(CharLSTM(hidden=16), (6,), 20, text=True),
    "nanogpt": Case(NanoGPT(layers=2, heads=2, width=16, dropout=0.2), (6,), 20, text=True),
    "nanogpt_tied": Case(
        NanoGPT(layers=1, heads=2, width=16, tie_weights=True), (6,), 20, text=True
    ),
}


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    """A case by name: parametrize with `indirect=True`."""
    return CASES[request.param]
