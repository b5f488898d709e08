"""Tensors that lie one after another in one memory are found again without a copy."""

import gc

import pytest
import torch

from gradwire.core.codec import is_finite
from gradwire.core.rows import (
    cut,
    joined_in_memory,
    row_of,
    rows_in_memory,
    split_rows,
    split_vector,
    stack_rows,
    whole_of,
)


def test_rows_are_stacked_without_a_copy() -> None:
    whole = torch.arange(12.0).view(3, 4)
    rows = split_rows(whole)
    assert stack_rows(rows) is whole
    assert [row_of(row)[1] for row in rows if row_of(row)] == [0, 1, 2]


def test_views_of_one_memory_are_stacked_without_a_copy() -> None:
    whole = torch.arange(24.0).view(4, 3, 2)
    found = rows_in_memory([whole[1], whole[2], whole[3]])
    assert found is not None
    assert found.data_ptr() == whole[1].data_ptr()
    assert torch.equal(found, whole[1:])


@pytest.mark.parametrize(
    "tensors",
    [
        lambda x: [x[1], x[0]],
        lambda x: [x[0], x[2]],
        lambda x: [x[0], x[0]],
        lambda x: [x[0], x[1].clone()],
        lambda x: [x[:, 0], x[:, 1]],
        lambda x: [x[0, :2], x[0, 2:]],
    ],
    ids=["order", "gap", "same", "elsewhere", "strided", "lengths"],
)
def test_others_are_copied(tensors) -> None:
    x = torch.arange(15.0).view(3, 5)
    parts = tensors(x)
    assert rows_in_memory(parts) is None
    if len({len(part) for part in parts}) == 1:
        assert torch.equal(stack_rows(parts), torch.stack(parts))


def test_vectors_of_one_memory_are_joined_without_a_copy() -> None:
    x = torch.arange(10.0)
    pieces = x.tensor_split(3)
    found = joined_in_memory(pieces)
    assert found is not None
    assert found.data_ptr() == x.data_ptr()
    assert torch.equal(found, x)
    assert joined_in_memory([pieces[1], pieces[0]]) is None
    assert joined_in_memory([pieces[0], pieces[1].clone()]) is None


def test_rows_are_checked_together() -> None:
    whole = torch.ones(4, 3)
    whole[2, 1] = torch.nan
    whole[3, 0] = torch.inf
    assert [is_finite(row) for row in split_rows(whole)] == [True, True, False, False]


def test_a_row_whose_sum_overflows_is_finite() -> None:
    whole = torch.full((2, 3), 3e38)
    assert [is_finite(row) for row in split_rows(whole)] == [True, True]


def test_a_row_that_is_gone_is_forgotten() -> None:
    rows = split_rows(torch.zeros(2, 3))
    identities = [id(row) for row in rows]
    del rows
    gc.collect()
    later = [torch.ones(3) for _ in range(20)]
    assert all(row_of(each) is None for each in later)
    assert len(identities) == 2


def test_a_part_of_a_row_is_a_row_of_the_same_part_of_all() -> None:
    whole = torch.arange(30.0).view(3, 10)
    rows = split_rows(whole)
    parts = [cut(row, 2, 7) for row in rows]
    found = [row_of(part) for part in parts]
    assert all(one is not None for one in found)
    assert len({id(one[0]) for one in found if one}) == 1
    assert [one[1] for one in found if one] == [0, 1, 2]
    for part, row in zip(parts, rows):
        assert torch.equal(part, row[2:7])
    stacked = stack_rows(parts)
    assert stacked.is_contiguous()
    assert torch.equal(stacked, whole[:, 2:7])


def test_all_of_a_row_is_the_row_itself() -> None:
    (row,) = split_rows(torch.zeros(1, 4))
    assert cut(row, 0, 4) is row


def test_only_the_rows_whose_part_has_nan_are_not_finite() -> None:
    whole = torch.zeros(3, 10)
    whole[1, 8] = float("nan")
    rows = split_rows(whole)
    assert [is_finite(cut(row, 0, 8)) for row in rows] == [True, True, True]
    assert [is_finite(cut(row, 8, 10)) for row in rows] == [True, False, True]


def test_parts_of_a_vector_are_put_together_without_a_copy() -> None:
    whole = torch.arange(7.0)
    pieces = split_vector(whole, 3)
    assert [len(piece) for piece in pieces] == [3, 2, 2]
    assert whole_of(pieces) is whole
    assert whole_of(pieces[:2]) is None
    assert whole_of(pieces[::-1]) is None
    assert whole_of((*pieces[:2], pieces[2].clone())) is None
    assert whole_of(()) is None


def test_parts_of_two_vectors_are_no_whole() -> None:
    a, b = split_vector(torch.zeros(4), 2), split_vector(torch.zeros(4), 2)
    assert whole_of((a[0], b[1])) is None
