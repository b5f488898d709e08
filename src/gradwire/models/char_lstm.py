"""The character model of McMahan et al. 2017 ("Communication-efficient learning of deep networks
from decentralized data", sec. 3): an embedding of 8, two LSTM layers of 256, and a dense layer
to the vocabulary. The paper predicts one character per line; here every position predicts.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from gradwire.models.base import Model, check_text_shape


@dataclass(frozen=True, repr=False)
class CharLSTM(Model):
    """A stacked LSTM that predicts the next character at every position."""

    paper: ClassVar[str] = (
        "McMahan et al. 2017, Communication-efficient learning of deep networks from "
        "decentralized data"
    )
    embedding: int = 8
    hidden: int = 256
    layers: int = 2

    def __post_init__(self) -> None:
        if min(self.embedding, self.hidden, self.layers) < 1:
            raise ValueError(
                "char_lstm needs embedding, hidden and layers of at least 1, "
                f"got {self.embedding}, {self.hidden}, {self.layers}"
            )

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        check_text_shape(self, input_shape)
        return _StackedLSTM(num_classes, self.embedding, self.hidden, self.layers)


class _StackedLSTM(nn.Module):
    def __init__(self, vocabulary: int, embedding: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, num_layers=layers, batch_first=True)
        self.fc = nn.Linear(hidden, vocabulary)

    def forward(self, symbols: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(symbols))  # [B, L, hidden]
        return self.fc(states)  # [B, L, vocabulary]
