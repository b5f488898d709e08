"""bfloat16: 8 significant bits, the range of float32.

Use it to halve the traffic with nothing to tune, where gradients may be huge or tiny: no float32 in
the normal range overflows or vanishes. Payloads add in an all-reduce and `ef(...)` is hardly
needed; `fp16` errs less where its range suffices.
"""

from dataclasses import dataclass

import torch

from gradwire.compression.quantization._cast import Cast


@dataclass(frozen=True, repr=False)
class BF16(Cast):
    """Round every element to bfloat16: 16 bits each."""

    target = torch.bfloat16

    paper = "Kalamkar et al. 2019, A study of bfloat16 for deep learning training"
