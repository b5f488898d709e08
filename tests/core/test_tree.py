"""Trees of tensors."""

from collections import OrderedDict, namedtuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from gradwire.core.tree import (
    leaves_of,
    map_leaves,
    signature_of,
    tensors_of,
    to_device,
    with_tensors,
)

Pair = namedtuple("Pair", "first second")
TREES = [
    torch.ones(2),
    (torch.ones(1), [torch.ones(2), None]),
    {"a": torch.ones(1), "b": {"c": (torch.ones(3),)}, "n": 5},
    Pair(torch.ones(1), torch.ones(2)),
    [],
    "text",
]


@pytest.mark.parametrize("tree", TREES, ids=repr)
def test_tensors_are_replaced_in_order(tree):
    tensors = tensors_of(tree)
    doubled = with_tensors(tree, [2 * tensor for tensor in tensors])
    assert type(doubled) is type(tree)
    assert [t.tolist() for t in tensors_of(doubled)] == [(2 * t).tolist() for t in tensors]
    assert signature_of(doubled) == signature_of(tree)
    assert len(leaves_of(doubled)) == len(leaves_of(tree))


def test_signatures_tell_forms_shapes_types_and_values_apart():
    x = torch.ones(2)
    others = [x, (x,), [x], {"a": x}, {"b": x}, (x, 1), (x, 2), x.double(), torch.ones(3), (x, x)]
    assert len({signature_of(tree) for tree in others}) == len(others)
    assert signature_of({"a": x}) == signature_of(OrderedDict(a=torch.zeros(2)))


def test_mappings_become_dicts_and_packed_sequences_are_leaves():
    packed = pack_sequence([torch.ones(2)])
    assert type(map_leaves(lambda leaf: leaf, OrderedDict(a=1))) is dict
    assert leaves_of([packed]) == [packed]
    moved = to_device({"a": packed, "b": 3}, "meta")
    assert moved["a"].data.device.type == "meta"
    assert moved["b"] == 3
