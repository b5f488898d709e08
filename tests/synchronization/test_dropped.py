"""Gradients that are not finite, whatever asks for them."""

import pytest


@pytest.mark.parametrize(
    ("synchronization", "architecture"),
    [
        ("bsp", "allreduce"),  # one mean of all
        ("localsgd(2)", "allreduce"),  # gradients of its own
        ("lag(0.0)", "allreduce"),
        ("crpsgd(2.0)", "allreduce"),
        ("asp", "gossip(ring, adpsgd)"),
        ("asp", "parameter_server(1)"),  # pushed
        ("bsp", "parameter_server(1)"),
    ],
)
def test_all_that_were_evaluated_count(train, synchronization, architecture):
    """Also those that were dropped."""
    trained = train(synchronization, architecture, steps=4, bad=[(1, 1)], nonfinite="skip")
    assert trained.replicas[1].num_dropped == 1
    assert [replica.num_gradients for replica in trained.replicas] == [4, 4, 4, 4]
