"""Gradients saved from training, to measure codecs on: `experiments/save_gradients.py` makes them.

Four networks, each early and late in training; a vector is some whole layers of one worker's
gradient in float32. They come with the package as `data/gradients.npz`.
"""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import gradwire.data

FILE = Path(gradwire.data.__file__).with_name("gradients.npz")


@functools.cache
def _arrays() -> dict[str, Any]:
    with np.load(FILE, allow_pickle=False) as arrays:
        return dict(arrays)


def saved_gradients() -> dict[str, Tensor]:
    """Flat vectors by name: "mlp early", "nanogpt late", ..."""
    return {
        name: torch.from_numpy(array.copy())
        for name, array in _arrays().items()
        if name not in ("facts", "workers")
    }


def saved_facts() -> dict[str, dict[str, Any]]:
    """By name: the network, the data, the step, the layers with their shapes, and `facts`."""
    facts: dict[str, dict[str, Any]] = json.loads(str(_arrays()["facts"]))
    return facts


def worker_gradients() -> Tensor:
    """One weight matrix as four workers see it at the same step, [4, rows, columns]."""
    return torch.from_numpy(_arrays()["workers"].copy())


def facts(x: Tensor) -> dict[str, float]:
    """How a vector is distributed: length, norm, kurtosis (3 for a Gaussian), sparsity.

    `top1` is the share of the energy in the hundredth of the elements that are largest.
    """
    values = x.double()
    squares = values.square()
    centred = (values - values.mean()).square()
    largest = squares.topk(max(1, x.numel() // 100)).values
    return {
        "numel": x.numel(),
        "norm": float(squares.sum().sqrt()),
        "kurtosis": float(centred.square().mean() / centred.mean().square()),
        "zeros": float((x == 0).double().mean()),
        "top1": float(largest.sum() / squares.sum()),
    }
