"""Running statistics of many workers as matrices, and what a worker sees of them."""

import copy
import io

import pytest
import torch
from torch import Tensor

from gradwire.core.replica import Replica
from gradwire.experiment.run.outcome import to_dict
from gradwire.training.evaluation.statistics import StatisticsLayout


@pytest.fixture
def layout() -> StatisticsLayout:
    return StatisticsLayout(of_worker(0))


def of_worker(number: int) -> dict[str, Tensor]:
    return {
        "norm.mean": torch.arange(3.0) + number,
        "norm.count": torch.tensor(number),
        "wide.mean": torch.arange(4.0).view(2, 2) - number,
        "half": torch.full((2,), number, dtype=torch.float16),
        "wide.count": torch.tensor(-number),
    }


def assert_same(found, expected) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)


def test_vectors_hold_all_tensors(layout: StatisticsLayout) -> None:
    vectors = layout.flatten(of_worker(5))
    assert [(len(x), x.dtype) for x in vectors] == [
        (7, torch.float32),
        (2, torch.int64),
        (2, torch.float16),
    ]
    assert_same(layout.unflatten(vectors), of_worker(5))


def test_rows_are_what_was_stacked(layout: StatisticsLayout) -> None:
    wholes = layout.stack([of_worker(number) for number in range(4)])
    for number, row in enumerate(layout.rows(wholes, 4)):
        assert_same(row, of_worker(number))
        assert row.keys() == of_worker(number).keys()
        assert dict(row).keys() == row.keys()
        assert row["half"] is row["half"]
        with pytest.raises(KeyError):
            row["other"]


def test_rows_of_one_evaluation_are_not_copied(layout: StatisticsLayout) -> None:
    rows = layout.rows(layout.stack([of_worker(number) for number in range(4)]), 4)
    assert layout.stack(rows) is rows[0].wholes
    for order in ([3, 1, 2, 0], [0, 1], [0, 1, 2, 3, 0], [2]):
        again = layout.rows(layout.stack([rows[i] for i in order]), len(order))
        for number, row in zip(order, again):
            assert_same(row, of_worker(number))


def test_rows_of_several_evaluations_and_others(layout: StatisticsLayout) -> None:
    first = layout.rows(layout.stack([of_worker(1), of_worker(2)]), 2)
    second = layout.rows(layout.stack([of_worker(3), of_worker(4)]), 2)
    foreign = StatisticsLayout(of_worker(0))
    third = foreign.rows(foreign.stack([of_worker(5)]), 1)
    mixed = [second[1], first[1], third[0], of_worker(6), first[0]]
    for number, row in zip([4, 2, 5, 6, 1], layout.rows(layout.stack(mixed), 5)):
        assert_same(row, of_worker(number))


def test_without_statistics() -> None:
    layout = StatisticsLayout({})
    wholes = layout.stack([{}, {}])
    assert wholes == ()
    rows = layout.rows(wholes, 2)
    assert [dict(row) for row in rows] == [{}, {}]
    assert layout.stack(rows) == ()


def test_rows_are_saved_as_plain_tensors(layout: StatisticsLayout) -> None:
    rows = layout.rows(layout.stack([of_worker(number) for number in range(3)]), 3)
    file = io.BytesIO()
    torch.save([to_dict(Replica(torch.zeros(2), row, {}, ())) for row in rows], file)
    file.seek(0)
    loaded = [Replica(**saved) for saved in torch.load(file, weights_only=True)]
    for number, replica in enumerate(loaded):
        assert_same(replica.buffers, of_worker(number))
    assert_same(copy.deepcopy(rows[1]), of_worker(1))
