"""Buckets cut into matrices and put together again."""

import pytest
import torch

from gradwire.compression.lowrank._matrix import layout

# name, start, stop, shape
TENSORS = (
    ("a", 0, 12, (3, 4)),
    ("bias", 12, 15, (3,)),
    ("scale", 15, 16, ()),
    ("b", 16, 28, (3, 2, 2)),
    ("c", 28, 38, (5, 2)),
    ("d", 38, 50, (3, 4)),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize(
    "chosen", [(1, 0, 0, 1, 1, 1), (1, 0, 0, 0, 1, 0), (0,) * 6, (0, 0, 0, 0, 0, 1)]
)
def test_cutting_and_assembling_are_inverse(dtype, chosen) -> None:
    x = torch.arange(50).to(dtype)
    bucket = layout(TENSORS, list(map(bool, chosen)))
    matrices, rest = bucket.matrices(x), bucket.rest(x)
    assert bucket.numel == 50
    assert bucket.num_plain == rest.numel() == 50 - sum(m.numel() for m in matrices)
    assert torch.equal(bucket.assemble([m.to(dtype) for m in matrices], rest), x)
    assert all(m.dtype == torch.promote_types(dtype, torch.float32) for m in matrices)


def test_equal_shapes_are_stacked() -> None:
    bucket = layout(TENSORS, [True, False, False, True, True, True])
    assert [(stack.n, stack.m, stack.num) for stack in bucket.stacks] == [(3, 4, 3), (5, 2, 1)]
    assert bucket.matrices(torch.arange(50.0))[0][2, 0].tolist() == [38, 39, 40, 41]
    assert bucket.rest(torch.arange(50.0)).tolist() == [12, 13, 14, 15]  # neighbours, one piece
    assert len(bucket.sizes) == 5
