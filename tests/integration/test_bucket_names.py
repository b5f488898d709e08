"""Residuals under DDP belong to parameters, also where a saved state meets other buckets."""

from typing import Any

import pytest

from integration.bucket_names_cases import SIZE
from integration.bucket_names_cases import run as run_cases
from runtime.process.launching import launch

OWN = [[i + 1.0] for i in range(8)]  # each parameter has its own residual


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("names")
    name = f"integration.bucket_names_cases:{run_cases.__name__}"
    codes, results = launch(folder, SIZE, name, 300)
    assert codes == [0] * SIZE
    return results


def test_numbers_are_those_of_the_saved_run_where_the_first_buckets_are(ranks):
    assert all(result["same"] == OWN for result in ranks)


@pytest.mark.parametrize("case", ["other", "fewer"])
def test_numbers_of_other_first_buckets_are_refused(ranks, case):
    for result in ranks:
        assert "Bucket 0 had" in result[case]
        assert "residuals would go to other parameters" in result[case]
        assert "named_parameters=model.named_parameters()" in result[case]


def test_a_state_that_is_loaded_after_the_first_step_is_compared_at_once(ranks):
    for result in ranks:
        same, other = result["later"]
        assert same == ""
        assert "residuals would go to other parameters" in other


def test_names_do_not_depend_on_buckets(ranks):
    assert all(result["named"] == OWN for result in ranks)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("now named", "it is of a hook without named_parameters"),
        ("no longer named", "the saved state has names of parameters: give ddp_comm_hook"),
        ("otherwise named", "which named_parameters does not have; it has module.0.bias"),
        ("of several runs", "they are not of one run"),
    ],
)
def test_names_and_numbers_are_not_mixed(ranks, case, expected):
    assert all(expected in result[case] for result in ranks)


def test_a_refusal_is_repeated_until_another_state_is_loaded(ranks):
    for result in ranks:
        first, second, fits = result["again"]
        assert "residuals would go to other parameters" in first
        assert second == first
        assert fits == ""


def test_nothing_is_expected_of_a_state_that_was_refused(ranks):
    for result in ranks:
        at_once, is_none, in_backward, fits = result["not expected"]
        assert "is that of rank 2 of 3, this is rank" in at_once
        assert is_none
        assert in_backward == at_once
        assert fits == ""


def test_sparse_gradients_are_refused(ranks):
    for result in ranks:
        assert "the gradient of a parameter of [10, 4] is sparse" in result["sparse"]
        assert "sparse=False" in result["sparse"]
        assert "sparse_as_dense=True" in result["sparse"]
