"""Trees of plain values and tensors, as tensors alone."""

import pytest
import torch

from gradwire.integration.described import as_tensors, from_tensors

CPU = torch.device("cpu")
TREE = {
    "step": 3,
    "rate": 0.1,
    "none": None,
    "text": "ef(topk(0.1))",
    "flags": (True, False),
    "shape": torch.Size([2, 3]),
    "rows": [torch.arange(6).view(2, 3), {"empty": torch.empty(0, dtype=torch.bfloat16)}],
    3: torch.tensor(2.0, dtype=torch.float64),
}


def test_a_tree_comes_back_as_it_was():
    tensors = as_tensors(TREE, "a tree")
    assert all(isinstance(own, torch.Tensor) for own in tensors)
    again = from_tensors(tensors, CPU, "a tree")
    assert again.keys() == TREE.keys()
    assert [again[name] for name in ("step", "rate", "none", "text")] == [
        3,
        0.1,
        None,
        TREE["text"],
    ]
    assert again["flags"] == (True, False)
    assert again["shape"] == (2, 3)
    assert torch.equal(again["rows"][0], TREE["rows"][0])
    assert again["rows"][1]["empty"].dtype is torch.bfloat16
    assert again[3].dtype is torch.float64


def test_what_cannot_be_described_is_refused():
    with pytest.raises(ValueError, match="which is neither a tensor nor a plain value"):
        as_tensors({"a": object()}, "a tree")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda saved: saved[:-1], "damaged: a tensor is none"),
        (lambda saved: (*saved[:-1], torch.zeros(3)), r"is torch.float32 \[3\], expected"),
        (lambda saved: (saved[0][:-1], *saved[1:]), "is not what state_dict"),
        (lambda saved: (), "is not what state_dict"),
        (lambda saved: (1, 2), "is not what state_dict"),
    ],
)
def test_damaged_states_are_refused(change, match):
    with pytest.raises(ValueError, match=match):
        from_tensors(change(as_tensors(TREE, "a tree")), CPU, "a tree")
