"""How a model is dealt to servers."""

from itertools import pairwise

import pytest

from gradwire.core.key import Key
from gradwire.core.protocols import Bucket
from gradwire.training.shards import Unit, cut_at_shards, cut_into_shards


def tensors(*sizes: int) -> list[Bucket]:
    buckets, start = [], 0
    for i, size in enumerate(sizes):
        buckets.append(Bucket(f"t{i}", start, start + size))
        start += size
    return buckets


def test_shards_cover_the_model_in_nearly_equal_pieces() -> None:
    for seed in range(30):
        sizes = (1 + Key(seed).integers(12, 300)).tolist()
        for num_servers in range(1, 9):
            shards = cut_into_shards(tensors(*sizes), num_servers)
            assert len(shards) == num_servers
            assert shards[0].start == 0
            assert shards[-1].stop == sum(sizes)
            assert all(a.stop == b.start for a, b in pairwise(shards))
            ideal = sum(sizes) / num_servers
            for shard in shards:
                assert 0.75 * ideal <= shard.numel <= 1.25 * ideal


def test_large_tensors_are_cut_and_small_ones_kept_together() -> None:
    shards = cut_into_shards(tensors(100, 4, 4, 4), 2)
    assert [(shard.start, shard.stop) for shard in shards] == [(0, 56), (56, 112)]


def test_a_cut_near_the_end_of_a_tensor_moves_there() -> None:
    shards = cut_into_shards(tensors(48, 52), 2)
    assert [shard.numel for shard in shards] == [48, 52]
    shards = cut_into_shards(tensors(40, 60), 2)  # too far
    assert [shard.numel for shard in shards] == [50, 50]


def test_every_server_has_something() -> None:
    assert [shard.numel for shard in cut_into_shards(tensors(1, 1, 1), 3)] == [1, 1, 1]
    with pytest.raises(ValueError, match=r"4 servers for 3 parameters.*Take fewer"):
        cut_into_shards(tensors(1, 2), 4)
    assert cut_into_shards(tensors(5), 0) == []


def test_buckets_are_cut_where_shards_end() -> None:
    buckets = tensors(10, 2, 8)
    shards = [Bucket("a", 0, 4), Bucket("b", 4, 12), Bucket("c", 12, 20)]
    assert cut_at_shards(buckets, shards) == [
        Unit(Bucket("t0 / 0", 0, 4), 0),
        Unit(Bucket("t0 / 1", 4, 10), 1),
        Unit(Bucket("t1", 10, 12), 1),
        Unit(Bucket("t2", 12, 20), 2),
    ]
