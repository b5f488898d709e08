"""Tensors and codecs on which laws are checked."""

import random
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from gradwire.compression.identity import Identity
from gradwire.compression.quantization.fp16 import FP16
from gradwire.compression.quantization.sign import Sign
from gradwire.compression.sparsification.topk import TopK
from gradwire.core.codec import Codec

Layout = Literal["contiguous", "transposed", "strided"]
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SHAPES = ((0,), (1,), (7,), (8,), (65,), (300,), (3, 5), (0, 4), (2, 3, 7), ())
ZEROS = (0.0, 0.5, 0.95)  # fractions of elements that are zero
LAYOUTS: tuple[Layout, ...] = ("contiguous", "transposed", "strided")
# Some to chain with, and whose bytes are refused.
OTHER_CODECS: tuple[Codec, ...] = (Identity(), FP16(), TopK(0.3), Sign())


def exponents(dtype: torch.dtype) -> tuple[int, int]:
    """The powers of two by which a standard normal may be multiplied.

    At the upper end a codec that scales (by 100, at a density of 0.01) leaves the range of float16,
    and must saturate.
    """
    return (-6, 12) if dtype == torch.float16 else (-40, 40)


def make_tensor(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    exponent: int,
    zeros: float,
    layout: Layout,
    seed: int,
) -> Tensor:
    """Normally distributed, some of it zero, laid out in memory as asked."""
    generator = torch.Generator().manual_seed(seed)
    wide = (*shape[:-1], 2 * shape[-1]) if layout == "strided" and shape else shape
    x = torch.randn(wide, generator=generator, dtype=torch.float64) * 2.0**exponent
    x = x * (torch.rand(wide, generator=generator) >= zeros)
    x = x.to(dtype)
    if layout == "strided" and shape:
        x = x[..., ::2]
    if layout == "transposed" and x.dim() >= 2:
        x = x.transpose(0, -1)
    return x


def _drawn() -> Iterator[Tensor]:
    """Every shape and dtype, in all layouts, the same in every process."""
    draw = random.Random(0)
    shapes = list(SHAPES) * 2
    draw.shuffle(shapes)
    for number, shape in enumerate(shapes):
        dtype = DTYPES[number % len(DTYPES)]
        exponent = draw.randint(*exponents(dtype))
        layout = draw.choice(LAYOUTS)
        yield make_tensor(dtype, shape, exponent, draw.choice(ZEROS), layout, number)


TENSORS = tuple(_drawn())
