"""The global generators of torch, Python and numpy, seeded for a while and put back.

For code that is not ours and draws from them: a user's own module, data set or factory.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch

from gradwire.core.key import Key


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seeds the generators of the CPU, and that of `device` if it is an accelerator."""
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    cuda = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed all devices
        if cuda:
            with torch.cuda.device(cuda[0]):
                torch.cuda.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python_state)
            numpy.random.set_state(numpy_state)


def seed_of(key: Key) -> int:
    """A seed that depends on the key alone."""
    high, low = key.words(2).tolist()
    return (high & 0x7FFFFFFF) << 32 | (low & 0xFFFFFFFF)
