"""Modules and data as users write them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire
from gradwire.experiment.run.outcome import Run


@pytest.fixture
def build() -> Callable[[Callable[[], nn.Module]], nn.Module]:
    """Makes a module from seeded generators, which it puts back."""

    def make(factory: Callable[[], nn.Module], seed: int = 1) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return factory()

    return make


@pytest.fixture
def simulate() -> Callable[..., Run]:
    """`gradwire.simulate` for a few steps of two workers, with the time of a gradient given."""

    def run(**settings: Any) -> Run:
        few = {"workers": 2, "batch_size": 8, "steps": 6, "compute": "fixed(0.01)"}
        return gradwire.simulate(**{**few, **settings})

    return run


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def points() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Points of four dimensions in three classes: (train, test)."""

    def part(num: int, seed: int) -> tuple[Tensor, Tensor]:
        x = normal(num, 4, seed=seed)
        return x, x[:, :3].argmax(dim=1)

    return part(96, 0), part(40, 1)
