"""What workers and servers say to each other."""

from gradwire.core.protocols import Bucket
from gradwire.training.shards import cut_at_shards, cut_into_shards
from gradwire.training.wire import PushHeader


def test_pieces_of_front_layers_go_first_where_large_messages_queue_up():
    tensors = [Bucket("front", 0, 10), Bucket("middle", 10, 30), Bucket("back", 30, 64)]
    units = cut_at_shards(tensors, cut_into_shards(tensors, 2))
    headers = [PushHeader(i, 0, 1, 5, True) for i in range(len(units))]
    in_order = sorted(zip(headers, units), key=lambda pair: pair[0].priority)
    starts = [unit.bucket.start for _, unit in in_order]
    assert starts == sorted(starts)
    assert len(set(starts)) > 2
