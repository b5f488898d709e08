"""How gradients are computed on CUDA, where there is a choice: TF32, and the layout of images.

Both change bits, so they are settings and part of a run's record, and neither depends on a timing.
On a CPU they have no effect. Convolutions take only algorithms that give the same bits each time:
with others two evaluations of one gradient of few workers differed by 3e-5, and took no less time.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

TF32 = Literal["none", "convolutions", "all"]


@dataclass(frozen=True)
class Arithmetic:
    """`tf32`: which products of float32 are rounded to 10 bits of mantissa before they are
    multiplied (sums stay float32). `channels_last`: convolutions have channels innermost.
    """

    tf32: TF32 = "convolutions"  # as PyTorch has it
    channels_last: bool = False

    @contextlib.contextmanager
    def used_on(self, device: torch.device) -> Iterator[None]:
        """Lets torch compute so for a while."""
        if device.type != "cuda":
            yield
            return
        products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
        before = products.allow_tf32, convolutions.allow_tf32, convolutions.deterministic
        products.allow_tf32 = self.tf32 == "all"
        convolutions.allow_tf32 = self.tf32 != "none"
        convolutions.deterministic = True
        try:
            yield
        finally:
            products.allow_tf32, convolutions.allow_tf32, convolutions.deterministic = before


USUAL = Arithmetic()
