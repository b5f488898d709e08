"""Collectives of the process group that have not ended when the process does."""

import threading
from typing import Any

import torch

from gradwire.runtime.process.group_means import GroupMeans


class _Work:
    def __init__(self) -> None:
        self.future: torch.futures.Future[Any] = torch.futures.Future()

    def get_future(self) -> Any:
        return self.future


class _Group:
    def __init__(self) -> None:
        self.works: list[_Work] = []

    def allreduce(self, tensors: Any) -> _Work:
        self.works.append(_Work())
        return self.works[-1]


def test_the_end_of_collectives_is_awaited():
    group, arrivals = _Group(), []
    means = GroupMeans(group, None, 0, 2, arrivals.append)
    means.wait_all(60.0)  # none is under way
    numbers = [means.start(torch.ones(3)), means.start(torch.ones(2))]
    means.wait_all(0.0)  # not longer than it may
    assert not arrivals
    ending = threading.Thread(target=lambda: [w.future.set_result(None) for w in group.works])
    ending.start()
    means.wait_all(60.0)
    assert [arrival.number for arrival in arrivals] == numbers
    ending.join()
