"""Payloads of codecs that select are added to one vector: the mean of what they decode to."""

import pytest
import torch

from gradwire.compression import COMPRESSION
from gradwire.core.fusion import decode_mean
from gradwire.core.group import mean_in_order
from gradwire.core.key import Key
from gradwire.core.spec import Spec

CODECS = [
    "topk(0.1)",
    "topk(1.0)",
    "sampledk(0.05)",
    "adaptive_density(300)",
    "topk(0.1) >> qsgd(bits=4)",
    "topk(0.1) >> fp16",
    "sidco(0.1)",
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("text", CODECS)
def test_the_sum_of_what_was_selected(text, dtype) -> None:
    codec, key, generator = COMPRESSION.parse(text), Key(3), torch.Generator().manual_seed(1)
    tensors = [torch.randn(40, 50, generator=generator).to(dtype) for _ in range(3)]
    spec, keys = Spec.of(tensors[0]), [key.private(rank) for rank in range(3)]
    payloads = [codec.encode(x, codec.init(spec), own)[0] for x, own in zip(tensors, keys)]
    assert codec.fusion.adds_few
    mean = decode_mean(codec, payloads, spec, keys)
    decoded = [codec.decode(payload, spec, own) for payload, own in zip(payloads, keys)]
    assert mean.dtype == dtype
    assert torch.equal(mean, mean_in_order(decoded, 3))
    assert torch.equal(decode_mean(codec, payloads[:1], spec, keys[:1]), decoded[0])
