"""How many CPU threads torch uses."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Lets torch use so many CPU threads for a while; 0: as many as it uses now."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
