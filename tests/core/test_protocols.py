from dataclasses import fields

import pytest
import torch

from gradwire.architecture.allreduce.ring import Ring
from gradwire.architecture.parameter_server.parameter_server import ParameterServer
from gradwire.core.protocols import Bucket, Replica, ability_of
from gradwire.synchronization.asp import ASP
from gradwire.synchronization.bsp import BSP


def test_a_pair_that_fits_uses_what_the_algorithm_prefers() -> None:
    assert ability_of(BSP(), Ring()) == "mean"
    assert ability_of(BSP(), ParameterServer()) == "mean"
    assert ability_of(BSP(), ParameterServer(optimizer="server")) == "push_pull"
    assert ability_of(ASP(), ParameterServer()) == "push_pull"


def test_a_pair_that_does_not_fit_says_what_is_needed_what_is_offered_and_why() -> None:
    with pytest.raises(ValueError, match=r"needs an architecture with push_pull.*ring offers mean"):
        ability_of(ASP(), Ring())
    with pytest.raises(ValueError, match=r"needs everyone.*Try parameter_server"):
        ability_of(ASP(), Ring())
    with pytest.raises(ValueError, match="offers mean"):
        ability_of(ASP(), ParameterServer(optimizer="worker"))


def test_a_bucket_counts_its_elements() -> None:
    assert Bucket("fc.weight", 10, 25).numel == 15


def test_a_changed_replica_leaves_the_old_one_as_it_was() -> None:
    old = Replica(torch.zeros(2), {}, {}, ())
    new = old.having(params=torch.ones(2))
    assert old.params.tolist() == [0, 0]
    assert new.params.tolist() == [1, 1]
    assert new.memory is old.memory


def test_a_changed_replica_keeps_all_other_fields() -> None:
    values = {field.name: object() for field in fields(Replica)}
    old = Replica(**values)
    for name in values:
        changed = old.having(**{name: None})
        kept = {each: getattr(changed, each) for each in values}
        assert kept == {**values, name: None}
    with pytest.raises(TypeError, match="a replica has"):
        old.having(weights=1)
