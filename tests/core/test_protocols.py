import pytest
import torch

from gradwire.architecture.ring import Ring
from gradwire.core.protocols import Bucket, Replica, check_fit
from gradwire.synchronization.bsp import BSP


class Pushing(BSP):
    needs = "push_pull"


def test_a_pair_that_fits_is_accepted() -> None:
    assert check_fit(BSP(), Ring()) is None


def test_a_pair_that_does_not_fit_says_what_is_needed_and_what_is_offered() -> None:
    with pytest.raises(ValueError, match=r"needs an architecture with push_pull; ring offers mean"):
        check_fit(Pushing(), Ring())


def test_a_bucket_counts_its_elements() -> None:
    assert Bucket("fc.weight", 10, 25).numel == 15


def test_a_changed_replica_leaves_the_old_one_as_it_was() -> None:
    old = Replica(torch.zeros(2), {}, {}, ())
    new = old.having(params=torch.ones(2))
    assert old.params.tolist() == [0, 0]
    assert new.params.tolist() == [1, 1]
    assert new.memory is old.memory
