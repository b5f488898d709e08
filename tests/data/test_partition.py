import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.core.key import Key
from gradwire.core.registry import Registry
from gradwire.data import ByLabel, ByRole, DataPartition, Dataset, Dirichlet, Iid
from gradwire.data.partition import dirichlet, log_gamma_variates


def labelled(labels: torch.Tensor, num_classes: int) -> Dataset:
    images = torch.zeros(len(labels), 1, 1, 1, dtype=torch.uint8)
    return Dataset(
        "made", "image", images, labels, images, labels, num_classes, mean=(0.0,), std=(1.0,)
    )


def balanced(num_classes: int, per_class: int) -> Dataset:
    labels = torch.arange(num_classes * per_class) % num_classes
    return labelled(labels.to(torch.uint8), num_classes)


def spoken(sizes: list[int]) -> Dataset:
    text = torch.zeros(sum(sizes), 4, dtype=torch.uint8)
    roles = torch.arange(sum(sizes)).split(sizes)
    return Dataset("spoken", "text", text, text, text, text, num_classes=2, roles=roles)


def check_laws(partition: DataPartition, dataset: Dataset, num_workers: int, seed: int) -> list:
    shards = partition.shards(dataset, num_workers, Key(seed))
    assert shards is not None
    assert len(shards) == num_workers
    assert all(shard.dtype == torch.int64 and len(shard) > 0 for shard in shards)
    # disjoint, and all of it
    assert torch.equal(torch.cat(shards).sort().values, torch.arange(dataset.num_train))
    again = partition.shards(dataset, num_workers, Key(seed))
    assert again is not None
    assert all(torch.equal(a, b) for a, b in zip(shards, again))
    return shards


def label_counts(dataset: Dataset, shards: list) -> torch.Tensor:
    """[num_workers, num_classes]"""
    labels = dataset.train_targets.long()
    return torch.stack([torch.bincount(labels[s], minlength=dataset.num_classes) for s in shards])


def test_notation() -> None:
    registry = Registry("partition", DataPartition, "gradwire.data.partition")
    assert registry.names() == ["by_label", "by_role", "dirichlet", "iid"]
    for partition, text in [
        (Iid(), "iid"),
        (Dirichlet(0.5), "dirichlet(0.5)"),
        (ByLabel(), "by_label"),
        (ByLabel(3), "by_label(3)"),
        (ByRole(), "by_role"),
    ]:
        assert repr(partition) == text
        assert registry.parse(text) == partition


def test_iid_owns_nothing() -> None:
    assert Iid().shards(balanced(2, 4), 8, Key(0)) is None
    with pytest.raises(ValueError, match=r"iid needs 1 \.\. 8 workers .*, got 9"):
        Iid().shards(balanced(2, 4), 9, Key(0))


@settings(max_examples=30, deadline=None)
@given(
    alpha=st.floats(0.3, 1e6),
    num_workers=st.integers(1, 8),
    num_classes=st.integers(1, 10),
    per_class=st.integers(40, 80),
    seed=st.integers(0, 2**64 - 1),
)
def test_dirichlet_laws(alpha, num_workers, num_classes, per_class, seed) -> None:
    check_laws(Dirichlet(alpha), balanced(num_classes, per_class), num_workers, seed)


@settings(max_examples=30, deadline=None)
@given(
    labels=st.lists(st.integers(0, 5), min_size=12, max_size=100),
    num_workers=st.integers(1, 4),
    labels_per_worker=st.integers(1, 3),
    seed=st.integers(0, 2**64 - 1),
)
def test_by_label_laws(labels, num_workers, labels_per_worker, seed) -> None:
    dataset = labelled(torch.tensor(labels, dtype=torch.uint8), 6)
    shards = check_laws(ByLabel(labels_per_worker), dataset, num_workers, seed)
    # sizes differ by at most one example per piece
    sizes = [len(shard) for shard in shards]
    assert max(sizes) - min(sizes) <= labels_per_worker
    # a piece holds one label, plus one for every change of label within it
    num_labels = (label_counts(dataset, shards) > 0).sum()
    assert num_labels <= num_workers * labels_per_worker + len(set(labels)) - 1


@settings(max_examples=20, deadline=None)
@given(
    pieces_per_label=st.integers(1, 4),
    labels_per_worker=st.sampled_from([1, 2, 5]),
    seed=st.integers(0, 1000),
)
def test_by_label_gives_few_labels(pieces_per_label, labels_per_worker, seed) -> None:
    # as many equal pieces as fill the labels exactly: no piece crosses
    dataset = balanced(10, 12)
    num_workers = 10 * pieces_per_label // labels_per_worker
    shards = check_laws(ByLabel(labels_per_worker), dataset, num_workers, seed)
    assert ((label_counts(dataset, shards) > 0).sum(dim=1) <= labels_per_worker).all()


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=5, max_size=30),
    num_workers=st.integers(1, 5),
    seed=st.integers(0, 2**64 - 1),
)
def test_by_role_laws(sizes, num_workers, seed) -> None:
    dataset = spoken(sizes)
    shards = check_laws(ByRole(), dataset, num_workers, seed)
    assert dataset.roles is not None
    owners = {int(i): rank for rank, shard in enumerate(shards) for i in shard}
    held = [{owners[int(i)] for i in role} for role in dataset.roles]
    assert all(len(ranks) == 1 for ranks in held)  # a role is never divided
    numbers = [sum(ranks == {rank} for ranks in held) for rank in range(num_workers)]
    assert max(numbers) - min(numbers) <= 1


def test_large_alpha_is_even_and_small_alpha_is_skewed() -> None:
    dataset = balanced(10, 500)
    even = label_counts(dataset, check_laws(Dirichlet(1e5), dataset, 8, seed=1))
    assert (even - 500 / 8).abs().max() <= 3
    skewed = label_counts(dataset, check_laws(Dirichlet(0.05), dataset, 4, seed=1))
    assert skewed.max(dim=0).values.double().mean() > 0.8 * 500  # most of a class in one place


def test_seeds_matter() -> None:
    dataset = balanced(10, 20)
    for partition in [Dirichlet(1.0), ByLabel(2)]:
        one, other = (partition.shards(dataset, 4, Key(seed)) for seed in (0, 1))
        assert one is not None
        assert other is not None
        assert not all(torch.equal(a, b) for a, b in zip(one, other))


def test_moments_of_gamma_and_dirichlet() -> None:
    count = 20_000
    for shape in [1.0, 2.5, 50.0]:
        draws = log_gamma_variates(shape, count, Key(2).child("gamma")).exp()
        # mean and variance are both `shape`; five standard errors
        assert draws.mean().item() == pytest.approx(shape, abs=5 * math.sqrt(shape / count))
        error = math.sqrt((2 + 6 / shape) / count)
        assert draws.var().item() == pytest.approx(shape, rel=5 * error)
    for alpha in [0.02, 0.3, 4.0]:
        shares = dirichlet(alpha, count, 5, Key(3))
        assert torch.allclose(shares.sum(dim=1), torch.ones(count, dtype=torch.float64))
        variance = 0.2 * 0.8 / (5 * alpha + 1)
        error = 5 * math.sqrt(variance / count)
        assert shares.mean(dim=0).tolist() == pytest.approx([0.2] * 5, abs=error)
        assert shares.var(dim=0).tolist() == pytest.approx([variance] * 5, rel=0.1)


def test_errors() -> None:
    for alpha in [0.0, -1.0, math.inf, math.nan]:
        with pytest.raises(ValueError, match="finite alpha above 0, got"):
            Dirichlet(alpha)
    with pytest.raises(ValueError, match="at least 1 label per worker, got 0"):
        ByLabel(0)
    with pytest.raises(ValueError, match=r"dirichlet\(0\.001\) left some of 30 workers without"):
        Dirichlet(0.001).shards(balanced(3, 100), 30, Key(0))
    with pytest.raises(ValueError, match=r"by_label needs 1 \.\. 6 workers .*, got 7"):
        ByLabel().shards(balanced(3, 4), 7, Key(0))
    with pytest.raises(ValueError, match=r"by_role needs 1 \.\. 2 workers .*, got 3"):
        ByRole().shards(spoken([3, 4]), 3, Key(0))
    with pytest.raises(ValueError, match="made has none"):
        ByRole().shards(balanced(3, 4), 2, Key(0))
    for partition in [Dirichlet(1.0), ByLabel()]:
        with pytest.raises(ValueError, match=r"targets of spoken have shape \[7, 4\]"):
            partition.shards(spoken([3, 4]), 2, Key(0))
    for partition in [Iid(), Dirichlet(1.0), ByLabel()]:
        with pytest.raises(ValueError, match="got 0"):
            partition.shards(balanced(3, 4), 0, Key(0))
