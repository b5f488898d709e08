import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.core.key import Key
from gradwire.data import ByLabel, ByRole, Dataset, Dirichlet, Iid, Sampler


def made(num_train: int, roles: tuple[int, ...] = ()) -> Dataset:
    images = torch.zeros(num_train, 1, 1, 1, dtype=torch.uint8)
    labels = (torch.arange(num_train) % 3).to(torch.uint8)
    return Dataset(
        "made",
        "image",
        images,
        labels,
        images,
        labels,
        num_classes=3,
        mean=(0.0,),
        std=(1.0,),
        roles=torch.arange(num_train).split(roles) if roles else None,
    )


@settings(max_examples=50, deadline=None)
@given(
    num_workers=st.integers(1, 6),
    batch_size=st.integers(1, 5),
    extra=st.integers(0, 40),
    step=st.integers(0, 100),
    seed=st.integers(0, 2**64 - 1),
)
def test_workers_together_see_what_one_sees(num_workers, batch_size, extra, step, seed) -> None:
    total = num_workers * batch_size
    dataset = made(total + extra)
    many = Sampler(dataset, Iid(), num_workers, batch_size, Key(seed))
    one = Sampler(dataset, Iid(), 1, total, Key(seed))
    assert many.steps_per_epoch == one.steps_per_epoch
    together = torch.cat([many.indices(rank, step) for rank in range(num_workers)])
    assert together.dtype == torch.int64
    assert torch.equal(together, one.indices(0, step))


def test_an_epoch_without_shards_uses_everything_once() -> None:
    sampler = Sampler(made(31), Iid(), 3, 2, Key(4))
    assert sampler.steps_per_epoch == 5
    epochs = [
        torch.cat(
            [sampler.indices(rank, 5 * epoch + step) for step in range(5) for rank in range(3)]
        )
        for epoch in range(2)
    ]
    assert all(len(epoch.unique()) == 30 for epoch in epochs)  # one example is left out
    assert not torch.equal(epochs[0], epochs[1])


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(10, 30)),
    batch_size=st.integers(1, 4),
    seed=st.integers(0, 2**64 - 1),
)
def test_shards_are_gone_through_pass_by_pass(sizes, batch_size, seed) -> None:
    sampler = Sampler(made(sum(sizes), sizes), ByRole(), 3, batch_size, Key(seed))
    assert sampler.shards is not None
    for rank, shard in enumerate(sampler.shards):
        num_steps = 3 * len(shard)
        batches = [sampler.indices(rank, step) for step in range(num_steps)]
        assert all(batch.shape == (batch_size,) for batch in batches)
        # every pass holds every example of the shard once, and no other
        passes = torch.cat(batches).reshape(-1, len(shard))
        assert (passes.sort(dim=1).values == shard).all()


def test_is_a_function_of_rank_and_step() -> None:
    for partition in [Iid(), Dirichlet(1.0), ByLabel(1)]:
        dataset = made(60)
        calls = [(rank, step) for step in range(40) for rank in range(3)]
        forth = Sampler(dataset, partition, 3, 4, Key(1))
        back = Sampler(dataset, partition, 3, 4, Key(1))
        expected = {call: forth.indices(*call) for call in calls}
        for call in reversed(calls):
            assert torch.equal(back.indices(*call), expected[call])
        other = Sampler(dataset, partition, 3, 4, Key(2))
        assert any(not torch.equal(other.indices(*call), expected[call]) for call in calls)


def test_remembers_little() -> None:
    for partition, most in [(Iid(), 2), (Dirichlet(1.0), 2 * 3)]:
        sampler = Sampler(made(30), partition, 3, 2, Key(1))
        for step in range(200):
            for rank in range(3):
                sampler.indices(rank, step)
        assert len(sampler._orders) <= most


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"4 workers with a batch of 8 need 32 .* has 31"):
        Sampler(made(31), Iid(), 4, 8, Key(0))
    with pytest.raises(ValueError, match="got 2 workers and a batch of 0"):
        Sampler(made(31), Iid(), 2, 0, Key(0))
    sampler = Sampler(made(31), Iid(), 2, 4, Key(0))
    with pytest.raises(ValueError, match=r"rank must lie in 0 \.\. 1, got 2"):
        sampler.indices(2, 0)
    with pytest.raises(ValueError, match="step must be at least 0, got -1"):
        sampler.indices(0, -1)
