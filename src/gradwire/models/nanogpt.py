"""A small decoder-only transformer (Radford et al. 2019, "Language models are unsupervised
multitask learners"): layer norm before each sub-layer, learned positions, causal attention, a
GELU feed-forward layer of four times the width. Dropout acts on the embeddings and on what each
sub-layer adds, not inside the attention, so its masks stay small and can be drawn from a key.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.models.base import Model, check_text_shape


@dataclass(frozen=True, repr=False)
class NanoGPT(Model):
    """A pre-norm transformer that predicts the next symbol at every position."""

    paper: ClassVar[str] = (
        "Radford et al. 2019, Language models are unsupervised multitask learners"
    )
    layers: int = 4
    heads: int = 4
    width: int = 128
    dropout: float = 0.0
    tie_weights: bool = False  # one matrix embeds the symbols and makes the logits

    def __post_init__(self) -> None:
        if min(self.layers, self.heads, self.width) < 1 or self.width % self.heads:
            raise ValueError(
                "nanogpt needs layers and heads of at least 1 and a width that heads divide, "
                f"got layers={self.layers}, heads={self.heads}, width={self.width}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"nanogpt needs 0 <= dropout < 1, got {self.dropout}")

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        check_text_shape(self, input_shape)
        return _Transformer(self, input_shape[0], num_classes)


class _CausalAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [B, heads, L, width / heads]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class _TransformerBlock(nn.Module):
    def __init__(self, config: NanoGPT) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = _CausalAttention(config.width, config.heads)
        self.drop1 = nn.Dropout(config.dropout)
        self.norm2 = nn.LayerNorm(config.width)
        self.widen = nn.Linear(config.width, 4 * config.width)
        self.narrow = nn.Linear(4 * config.width, config.width)
        self.drop2 = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop1(self.attention(self.norm1(x)))
        return x + self.drop2(self.narrow(F.gelu(self.widen(self.norm2(x)))))


class _Transformer(nn.Module):
    def __init__(self, config: NanoGPT, length: int, vocabulary: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(vocabulary, config.width)
        self.positions = nn.Parameter(torch.empty(length, config.width))
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(_TransformerBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, vocabulary, bias=False)
        if config.tie_weights:
            self.head.weight = self.symbols.weight
        self._initialise(config.layers)

    def _initialise(self, num_layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                # Each block adds to the residual stream twice; the scale keeps its variance
                # independent of the depth (Radford et al. 2019, sec. 2.3).
                adds = name.endswith(("attention.out.weight", "narrow.weight"))
                std = 0.02 / math.sqrt(2 * num_layers) if adds else 0.02
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, symbols: Tensor) -> Tensor:
        length, limit = symbols.shape[1], self.positions.shape[0]
        if length > limit:
            raise ValueError(f"nanogpt was built for {limit} positions, got a text of {length}")
        x = self.drop(self.symbols(symbols) + self.positions[:length])  # [B, L, width]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # [B, L, vocabulary]
