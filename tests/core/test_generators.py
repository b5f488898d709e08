"""Seeded global generators."""

import random

import numpy
import pytest
import torch

from gradwire.core.generators import seed_of, seeded
from gradwire.core.key import Key


def draws():
    return float(torch.rand(())), random.random(), float(numpy.random.rand())


def states():
    return torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()


def test_generators_are_seeded_and_put_back():
    before = states()
    with seeded(5):
        first = draws()
    with seeded(5):
        assert draws() == first
    with seeded(6):
        assert all(one != other for one, other in zip(draws(), first))
    with pytest.raises(KeyError), seeded(5):
        raise KeyError(draws())
    assert states() == before


def test_seeds_follow_the_key():
    keys = [Key(0), Key(1), Key(0).at(1), Key(0).private(0), Key(0).private(1), Key(0).child("a")]
    seeds = [seed_of(key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [seed_of(key) for key in keys]
