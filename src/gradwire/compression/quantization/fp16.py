"""IEEE half precision: 11 significant bits, largest value 65504.

Use it to halve the traffic at the smallest loss, for gradients between 6e-5 (smaller ones lose
precision and vanish below 6e-8) and 65504, and as second stage of a sparsifier: `topk(0.01) >>
fp16`. Payloads add in an all-reduce and `ef(...)` is hardly needed; for a wider range take `bf16`.
"""

from dataclasses import dataclass

import torch

from gradwire.compression.quantization._cast import Cast


@dataclass(frozen=True, repr=False)
class FP16(Cast):
    """Round every element to float16: 16 bits each."""

    target = torch.float16

    paper = "Micikevicius et al. 2018, Mixed precision training"
