"""The laws of reducers, for every registered one: what n workers agree on, and what they keep."""

import pytest

from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.architecture.allreduce.ring import Ring
from gradwire.testing import reducer_laws
from gradwire.testing.reducer_laws import SIZES


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_gets_the_same_mean_of_the_right_shape(reducer, size) -> None:
    reducer_laws.every_rank_gets_the_same_mean_of_the_right_shape(reducer, size)


@pytest.mark.parametrize("architecture", [AllReduce("scatter"), Ring()], ids=repr)
def test_every_route_gives_the_same_mean(reducer, architecture) -> None:
    reducer_laws.every_route_gives_the_same_mean(reducer, architecture)


@pytest.mark.parametrize("size", [1, 3])
def test_the_same_keys_give_the_same_bits_and_bytes(reducer, size) -> None:
    reducer_laws.the_same_keys_give_the_same_bits_and_bytes(reducer, size)


@pytest.mark.parametrize("size", SIZES)
def test_zero_stays_zero(reducer, size) -> None:
    reducer_laws.zero_stays_zero(reducer, size)


@pytest.mark.parametrize("size", [1, 4])
def test_a_checkpoint_holds_the_state(reducer, size) -> None:
    reducer_laws.a_checkpoint_holds_the_state(reducer, size)


def test_a_state_is_not_changed_in_place(reducer) -> None:
    reducer_laws.a_state_is_not_changed_in_place(reducer)


def test_one_worker_sends_nothing(reducer) -> None:
    reducer_laws.one_worker_sends_nothing(reducer)


def test_the_owner_of_a_shard_does_not_feed_back_what_would_grow(codec) -> None:
    reducer_laws.the_owner_of_a_shard_does_not_feed_back_what_would_grow(codec)


def test_a_server_decodes_what_a_worker_alone_pushed(compression) -> None:
    reducer_laws.a_server_decodes_what_a_worker_alone_pushed(compression)
