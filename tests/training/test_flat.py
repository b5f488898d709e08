"""Flat vectors: layout, round trip, views, one concatenation in the backward."""

import pytest
import torch
from torch import nn

from gradwire.training.flat import FlatLayout, flatten


@pytest.fixture
def module() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        return nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1, bias=False))


def test_layout_names_slices_and_shapes(module: nn.Module) -> None:
    layout = FlatLayout.of(module)
    assert layout.tensors == (
        ("0.weight", 0, 6, (2, 3)),
        ("0.bias", 6, 8, (2,)),
        ("2.weight", 8, 10, (1, 2)),
    )
    assert layout.numel == 10


def test_flatten_copies_and_unflatten_views(module: nn.Module) -> None:
    layout = FlatLayout.of(module)
    flat = flatten(module)
    views = layout.unflatten(flat)
    for name, parameter in module.named_parameters():
        assert torch.equal(views[name], parameter)
        assert views[name].untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    assert torch.equal(layout.join(list(views.values())), flat)
    flat.zero_()
    assert all(parameter.abs().sum() > 0 for parameter in module.parameters())


def test_gradient_of_the_views_is_the_gradient_of_the_vector(module: nn.Module) -> None:
    layout = FlatLayout.of(module)
    flat = flatten(module).requires_grad_()
    views = layout.unflatten(flat)
    views["0.bias"].square().sum().backward()  # the other tensors are not used
    assert flat.grad is not None
    expected = torch.zeros(10)
    expected[6:8] = 2 * flat.detach()[6:8]
    assert torch.equal(flat.grad, expected)


def test_errors_say_what_was_expected(module: nn.Module) -> None:
    layout = FlatLayout.of(module)
    with pytest.raises(ValueError, match=r"vector of 10 parameters, got shape \(9,\)"):
        layout.unflatten(torch.zeros(9))
    with pytest.raises(ValueError, match=r"0.bias must have shape \(2,\), got \(3,\)"):
        layout.join([torch.zeros(2, 3), torch.zeros(3), torch.zeros(1, 2)])
    with pytest.raises(ValueError, match="ReLU has no parameters"):
        FlatLayout.of(nn.ReLU())
    module[2].double()  # type: ignore[index, union-attr]
    with pytest.raises(ValueError, match=r"several types, torch.float32, torch.float64"):
        FlatLayout.of(module)
