"""DoubleSqueeze: what was applied and what workers and servers hold is all there ever was."""

import pytest
import torch
from torch import Tensor

from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.architecture.allreduce.ring import Ring
from gradwire.compression import COMPRESSION
from gradwire.core.key import Key
from gradwire.core.reducer import Reduced
from gradwire.core.spec import Spec

NUMEL, STEPS = 61, 12


def gradients(size: int) -> list[list[Tensor]]:
    return [
        [Key(31).at(step).private(rank).normal(NUMEL).double() for step in range(STEPS)]
        for rank in range(size)
    ]


def server_residual(results: list[list[Reduced]]) -> Tensor:
    """What the owners of all shards hold, put together."""
    return torch.cat(
        [steps[-1].state["inner"]["scatter"]["owned"]["residual"] for steps in results]
    )


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("architecture", [AllReduce(), AllReduce("gather"), Ring()], ids=repr)
@pytest.mark.parametrize("codec", ["sign", "topk(0.1)", "qsgd(bits=8)", "topk(0.2) >> fp16"])
def test_nothing_is_lost(reduce, codec, architecture, size) -> None:
    inputs = gradients(size)
    reducer = COMPRESSION.parse(f"doublesqueeze({codec})")
    results, _ = reduce(reducer, inputs, architecture=architecture)
    applied = sum(step.mean for step in results[0])
    workers = sum(steps[-1].state["residual"] for steps in results) / size
    servers = server_residual(results)
    everything = sum(x for own in inputs for x in own) / size
    assert torch.allclose(applied + workers + servers, everything, rtol=0, atol=1e-12)
    assert workers.abs().max() > 1e-6
    if size > 1:  # what one worker sent encodes again without loss
        assert servers.abs().max() > 1e-6


def test_a_trajectory_by_hand(reduce) -> None:
    """Two workers, a shard of two elements each, of which the larger is sent."""
    first = [torch.tensor([4.0, 3.0, 0.0, 2.0]), torch.tensor([0.0, 0.0, 0.0, 0.0])]
    second = [torch.tensor([1.0, 2.0, 6.0, 0.0]), torch.tensor([0.0, 0.0, 0.0, 0.0])]
    results, _ = reduce(COMPRESSION.parse("doublesqueeze(topk(0.5))"), [first, second])
    # To the servers: (4, 0 | 0, 2) and (0, 2 | 6, 0). Means (2, 1 | 3, 1), of which 2 and 3 go out.
    assert results[0][0].mean.tolist() == [2, 0, 3, 0]
    assert results[0][0].state["residual"].tolist() == [0, 3, 0, 0]
    assert results[1][0].state["residual"].tolist() == [1, 0, 0, 0]
    held = [steps[0].state["inner"]["scatter"]["owned"]["residual"].tolist() for steps in results]
    assert held == [[0, 1], [0, 1]]
    # Then the 3 and the 1: mean (1/2, 3/2) plus (0, 1); the second shard is all feedback.
    assert results[0][1].mean.tolist() == [0, 2.5, 0, 1]


@pytest.mark.parametrize("size", [2, 4])
def test_it_is_ef_on_the_scatter_route(reduce, size) -> None:
    inputs = gradients(size)
    ours, a = reduce(COMPRESSION.parse("doublesqueeze(sign)"), inputs, architecture=AllReduce())
    other, b = reduce(COMPRESSION.parse("ef(sign)"), inputs, architecture=AllReduce("scatter"))
    assert a.ledger.total_bytes == b.ledger.total_bytes
    assert all(torch.equal(x.mean, y.mean) for x, y in zip(ours[0], other[0]))


def test_bytes_per_worker_do_not_grow_with_their_number(reduce) -> None:
    sent = {}
    for size in (4, 16):
        inputs = [[Key(1).private(rank).normal(16_000)] for rank in range(size)]
        for name in ("doublesqueeze", "ef"):
            reducer = COMPRESSION.parse(f"{name}(sign)")
            _, engine = reduce(reducer, inputs, architecture=AllReduce("gather"))
            sent[name, size] = engine.ledger.total_bytes / size
    assert sent["doublesqueeze", 16] < 1.6 * sent["doublesqueeze", 4]  # 15/16 to 3/4, and headers
    assert sent["ef", 16] == pytest.approx(5 * sent["ef", 4], rel=0.01)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("doublesqueeze(randomk(0.1))", r"averaged on the way.*ef\(randomk"),
        ("doublesqueeze(signvote)", "averaged on the way"),
        ("doublesqueeze(atomo(2))", "whole layers"),
        ("doublesqueeze(rans)", "must follow a quantiser"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(text, message) -> None:
    with pytest.raises(ValueError, match=message):
        COMPRESSION.parse(text)


def test_a_codec_whose_residual_grows_is_refused() -> None:
    reducer = COMPRESSION.parse("doublesqueeze(terngrad(0.0))")
    with pytest.raises(ValueError, match="no contraction on shards of 500"):
        reducer.init(Spec((1000,), torch.float32), 2)
