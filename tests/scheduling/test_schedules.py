"""A schedule changes when parts of a gradient travel, not what comes out."""

import pytest
import torch

from gradwire.scheduling import SCHEDULING
from scheduling.schedule_runs import (
    OVERLAPPING,
    assert_same_bits,
    prepared,
    train,
    train_in_sequence,
)

COMPRESSIONS = (
    "identity",
    "fp16",
    "ef(topk(0.1))",
    "sign",
    "qsgd(bits=4)",
    "powersgd(1)",
    "randomk(0.1)",
)
PAIRS = (
    ("bsp", "allreduce"),
    ("bsp", "ring"),
    ("bsp", "hierarchical(2)"),
    ("bsp", "parameter_server"),
    ("bsp", 'parameter_server(2, optimizer="server")'),
    ("localsgd(2)", "allreduce"),
    ("diloco(2)", "ring"),
    ("postlocalsgd(2, period=2)", "allreduce"),
    ("asp", "parameter_server"),
)
SERVED = {("bsp", 'parameter_server(2, optimizer="server")'), ("asp", "parameter_server")}
pytestmark = pytest.mark.filterwarnings("ignore::gradwire.core.errors.UnfedWarning")


def test_all_overlapping_schedules_are_tested():
    tested = {text.partition("(")[0] for text in OVERLAPPING}
    overlapping = {n for n in SCHEDULING.builtin_names() if SCHEDULING.parse(n).overlaps}
    assert tested == overlapping


@pytest.mark.parametrize("scheduling", OVERLAPPING)
@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize(("synchronization", "architecture"), PAIRS)
def test_bits_are_those_of_the_same_buckets_in_sequence(
    scheduling, compression, synchronization, architecture
):
    if compression == "powersgd(1)" and (synchronization, architecture) in SERVED:
        compression = "ef(qsgd(bits=2))"  # workers that push on their own need a codec
    settings = {
        "scheduling": scheduling,
        "compression": compression,
        "synchronization": synchronization,
        "architecture": architecture,
        "optimizer": "sgd(0.1, momentum=0.9, weight_decay=0.01)",
        "evaluation": "auto",  # workers are in step
    }
    if synchronization == "asp":  # far enough apart that a schedule does not change who is first
        settings |= {"speeds": "1, 0.7, 0.51, 0.37", "compute": "fixed(0.1)", "steps": 3}
    assert_same_bits(train(**settings), train_in_sequence(**settings))


@pytest.mark.parametrize("optimizer", ["sgd(0.1)", "sgd(0.1, momentum=0.9)", "adam(0.01)"])
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_updates_of_pieces_are_those_of_the_whole(optimizer, schedule):
    settings = {"optimizer": optimizer, "schedule": schedule, "compression": "ef(topk(0.1))"}
    scheduling = "priority(1000, credit=3000, merge=1000)"
    assert_same_bits(
        train(scheduling=scheduling, **settings),
        train_in_sequence(scheduling=scheduling, **settings),
    )


def test_weight_decay_before_compression_uses_parameters_that_have_arrived():
    """With momentum before compression, weight decay is added to each piece of the gradient."""
    settings = {
        "scheduling": "priority(1000, credit=3000, merge=1000)",
        "optimizer": "sgd(0.1, momentum=0.9, weight_decay=0.5)",
        "momentum_at": "before",
        "compression": "ef(topk(0.1))",
    }
    assert_same_bits(train(**settings), train_in_sequence(**settings))


@pytest.mark.parametrize("compression", ["ef(topk(0.1))", "qsgd(bits=4)"])
def test_wfbp_has_the_bits_of_sequential_by_layer(compression):
    assert_same_bits(
        train(scheduling="wfbp", compression=compression),
        train(scheduling='sequential("layer")', compression=compression),
    )


@pytest.mark.parametrize("scheduling", OVERLAPPING)
@pytest.mark.parametrize(
    "settings",
    [
        {"stragglers": "sometimes(0.5, slowdown=20.0)"},
        {"speeds": "1, 0.1, 3, 0.5"},
        {"latency": "10us, 5ms, 1ms, 50us", "bandwidth": "1Gbit, 1Mbit, 10Mbit, 1Gbit"},
        {"layer_times": "given((1.0, 50.0, 1.0), backward=(1.0, 0.01, 90.0))"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_collectives_have_one_order_whatever_order_gradients_come_in(scheduling, settings):
    """Workers far apart neither wait for each other for ever nor mix up buckets."""
    settings = {"scheduling": scheduling, "compression": "ef(topk(0.1))", **settings}
    assert_same_bits(train(**settings), train_in_sequence(**settings))


REFUSED = [
    ({"nonfinite": "skip"}, 'nonfinite="skip" drops a step before'),
    ({"architecture": "gossip(ring)"}, r"gossip\(ring\) averages models after a step"),
    ({"synchronization": "lag(0.1)"}, r"lag\(0.1\) decides by the whole gradient"),
    ({"synchronization": "laq(0.1)"}, r"laq\(0.1\) decides by the whole gradient"),
    (
        {
            "clip_norm": 1.0,
            "momentum_at": "before",
            "optimizer": "sgd(0.1, momentum=0.9)",
            "compression": "ef(topk(0.1))",
        },
        "each worker clips its gradient by the norm of the whole",
    ),
    (
        {"clip_norm": 1.0, "architecture": 'parameter_server(optimizer="server")'},
        "each worker clips its gradient by the norm of the whole",
    ),
]


@pytest.mark.parametrize("scheduling", OVERLAPPING)
@pytest.mark.parametrize(("settings", "reason"), REFUSED, ids=lambda value: str(value)[:30])
def test_what_needs_the_whole_gradient_is_refused(scheduling, settings, reason):
    with pytest.raises(ValueError, match=reason) as refusal:
        prepared(scheduling=scheduling, **settings)
    assert 'Take scheduling "sequential"' in str(refusal.value)


def test_the_next_forward_does_not_go_with_the_norm_of_the_mean():
    with pytest.raises(ValueError, match="clip_norm needs the norm of the whole mean"):
        prepared(scheduling="priority", clip_norm=1.0)
    clipped, whole = (
        train(scheduling=scheduling, clip_norm=0.01)
        for scheduling in ("wfbp", 'sequential("layer")')
    )
    assert torch.equal(clipped.params, whole.params)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fusion(2)", "nbytes is a number of bytes, at least 4, got 2"),
        ("fusion(first=0)", "first is a number of bytes"),
        ("priority(0)", "partition is a number of bytes"),
        ("priority(1000, credit=999)", "credit must be at least one partition"),
        ("mgwfbp(groups=(2, 2))", "each larger than the one before"),
        ("mgwfbp(groups=(0,))", "from 1 on"),
        ("wait_free", "wfbp"),
    ],
)
def test_wrong_parameters(text, message):
    with pytest.raises(ValueError, match=message):
        SCHEDULING.parse(text)


def test_groups_of_another_model():
    with pytest.raises(ValueError, match="the model has only 6 tensors"):
        prepared(scheduling="mgwfbp(groups=(2, 7))")
