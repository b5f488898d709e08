"""Ranks that start again must not meet those that are dead."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from gradwire.experiment.processes.meeting import name_attempt


def test_each_attempt_has_a_name_of_its_own():
    store = dist.HashStore()
    names = set()
    for attempt in range(3):
        # What the attempts before left in the store stays there, and so does a word of a rank that
        # was killed before it heard anything.
        store.set("gradwire/word/2", f"dead {attempt}")
        with ThreadPoolExecutor() as pool:
            waiting = [
                pool.submit(name_attempt, store, rank, 3, f"news {attempt} {rank}", 30.0)
                for rank in (0, 1, 2)
            ]
            found = {future.result() for future in waiting}
        ((name, news),) = found
        assert news == f"news {attempt} 0"
        names.add(name)
    assert len(names) == 3


def test_who_does_not_come_is_named():
    with pytest.raises(TimeoutError, match="rank 1 has not joined"):
        name_attempt(dist.HashStore(), 0, 2, "", 0.05)
    with pytest.raises(TimeoutError, match="rank 0 has not joined"):
        name_attempt(dist.HashStore(), 1, 2, "", 0.05)
