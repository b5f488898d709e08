"""How a module is called with the inputs of a batch."""

import pytest
import torch
from torch import nn

from gradwire.training.calling import arguments_of

A, B = torch.ones(1), torch.zeros(1)


def module(function):
    class Module(nn.Module):
        forward = function

    return Module()


@pytest.mark.parametrize(
    ("function", "inputs", "args", "kwargs"),
    [
        (lambda self, x: x, A, (A,), {}),
        (lambda self, x, y: x, (A, B), (A, B), {}),
        (lambda self, x, y: x, [A, B], (A, B), {}),
        (lambda self, pair: pair, (A, B), ((A, B),), {}),
        (lambda self, *all: all, (A, B), (A, B), {}),
        (lambda self, x, y=None: x, {"x": A, "y": B}, (), {"x": A, "y": B}),
        (lambda self, **named: named, {"x": A}, (), {"x": A}),
        (lambda self, batch: batch, {"x": A, "y": B}, ({"x": A, "y": B},), {}),
        (lambda self, batch: batch, {3: A}, ({3: A},), {}),
    ],
)
def test_inputs_are_passed_as_forward_takes_them(function, inputs, args, kwargs):
    assert arguments_of(module(function), inputs) == (args, kwargs)
