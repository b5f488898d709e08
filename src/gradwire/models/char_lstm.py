"""The character model of McMahan et al. 2017 ("Communication-efficient learning of deep networks
from decentralized data", sec. 3): an embedding of 8, two LSTM layers of 256, and a dense layer
to the vocabulary. The paper reads 80 characters and predicts the next one: `predicts="last"`. By
default every position predicts its successor, which learns more from each window.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor, nn

from gradwire.models.base import Model, check_text_shape


@dataclass(frozen=True, repr=False)
class CharLSTM(Model):
    """A stacked LSTM that predicts the next character, at every position or after the last."""

    paper: ClassVar[str] = (
        "McMahan et al. 2017, Communication-efficient learning of deep networks from "
        "decentralized data"
    )
    embedding: int = 8
    hidden: int = 256
    layers: int = 2
    predicts: Literal["all", "last"] = "all"  # positions whose successor is predicted

    def __post_init__(self) -> None:
        if self.predicts not in ("all", "last"):
            raise ValueError(f'char_lstm predicts "all" or "last", got {self.predicts!r}')
        if min(self.embedding, self.hidden, self.layers) < 1:
            raise ValueError(
                "char_lstm needs embedding, hidden and layers of at least 1, "
                f"got {self.embedding}, {self.hidden}, {self.layers}"
            )

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        check_text_shape(self, input_shape)
        is_last = self.predicts == "last"
        return _StackedLSTM(num_classes, self.embedding, self.hidden, self.layers, is_last)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().loss(outputs, self._asked(targets))

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().correct(outputs, self._asked(targets))

    def count(self, targets: Tensor) -> int:
        return super().count(self._asked(targets))

    def _asked(self, targets: Tensor) -> Tensor:
        """The characters that are predicted: [B, L], or [B] of the last position."""
        return targets[..., -1] if self.predicts == "last" else targets


class _StackedLSTM(nn.Module):
    def __init__(
        self, vocabulary: int, embedding: int, hidden: int, layers: int, is_last: bool
    ) -> None:
        super().__init__()
        self.is_last = is_last
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, num_layers=layers, batch_first=True)
        self.fc = nn.Linear(hidden, vocabulary)

    def forward(self, symbols: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(symbols))  # [B, L, hidden]
        return self.fc(states[:, -1] if self.is_last else states)  # [B, (L,) vocabulary]
