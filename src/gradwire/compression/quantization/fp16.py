"""IEEE half precision: 11 significant bits, largest value 65504."""

from dataclasses import dataclass

import torch

from gradwire.compression.quantization._cast import Cast


@dataclass(frozen=True, repr=False)
class FP16(Cast):
    """Round every element to float16: 16 bits each."""

    target = torch.float16

    paper = "Micikevicius et al. 2018, Mixed precision training"
