"""Chen et al. 2018: per bin, what rivals the largest residual once the gradient is added again."""

import pytest
import torch

from gradwire.compression.quantization.fp16 import FP16
from gradwire.compression.sparsification.adacomp import AdaComp
from gradwire.compression.sparsification.topk import TopK
from gradwire.core.fusion import encode_feedback
from gradwire.core.key import Key
from gradwire.core.lifted import lift
from gradwire.core.spec import Spec

KEY = Key(0)


def test_a_case_by_hand() -> None:
    codec, spec = AdaComp(3), Spec((6,), torch.float32)
    x = torch.tensor([4.0, -1.0, -2.0, 1.0, 0.0, -0.25])
    payload, _ = codec.encode(x, codec.init(spec), KEY)
    # At first dW = G, so half of the bin's maximum suffices. The scale is the mean of 4 and 1.
    assert codec.decode(payload, spec, KEY).tolist() == [2.5, 0.0, -2.5, 2.5, 0.0, 0.0]
    assert payload.parts["scale"].tolist() == [2.5]


def test_the_latest_gradient_counts_twice() -> None:
    codec, spec = AdaComp(3), Spec((3,), torch.float32)
    _, residual, state = encode_feedback(
        codec, torch.tensor([4.0, 1.0, 1.5]), torch.zeros(3), codec.init(spec), KEY
    )
    assert residual.tolist() == [0.0, 1.0, 1.5]  # 4 was sent, and is the mean maximum
    # G = 0.25, 1.75, 2 and dW = 0.25, 0.75, 0.5: H = 0.5, 2.5, 2.5 against a maximum of 2.
    payload, _, _ = encode_feedback(codec, torch.tensor([0.25, 0.75, 0.5]), residual, state, KEY)
    assert codec.decode(payload, spec, KEY).tolist() == [0.0, 2.0, 2.0]
    # With the same G but the gradient all in the first, only the largest passes.
    x, residual = torch.tensor([0.25, 0.0, 0.0]), torch.tensor([0.0, 1.75, 2.0])
    payload, _, _ = encode_feedback(codec, x, residual, residual, KEY)
    assert codec.decode(payload, spec, KEY).tolist() == [0.0, 0.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_state_is_the_residual_that_feedback_holds(dtype) -> None:
    codec, spec = AdaComp(10), Spec((5, 13), dtype)
    residual, state = torch.zeros(5, 13, dtype=dtype), codec.init(spec)
    for step in range(5):
        x = Key(1).at(step).normal(65).reshape(5, 13).to(dtype)
        _, residual, state = encode_feedback(codec, x, residual, state, KEY)
        assert torch.equal(state, residual.reshape(-1))


def test_every_bin_with_a_gradient_sends_its_largest() -> None:
    codec, x = AdaComp(50), Key(2).normal(1000)
    x[100:150] = 0
    payload, _ = codec.encode(x, codec.init(Spec.of(x)), KEY)
    sent = codec.decode(payload, Spec.of(x), KEY).reshape(-1, 50) != 0
    largest = x.reshape(-1, 50).abs().argmax(dim=1)
    at_largest = sent.gather(1, largest[:, None])[:, 0]
    assert at_largest.tolist() == [bin != 2 for bin in range(20)]
    assert not sent[2].any()


def test_an_inner_stage_has_no_memory_and_needs_none() -> None:
    chain, x = TopK(0.5) >> AdaComp(5), Key(3).normal(40)
    state = chain.init(Spec.of(x))
    first, state = chain.encode(x, state, KEY)
    again, _ = chain.encode(x, state, KEY)
    assert torch.equal(first.buffer, again.buffer)


def test_a_position_and_a_bit_each() -> None:
    x = Key(3).normal(100_000)
    payload, _ = AdaComp().encode(x, None, KEY)
    count = int(AdaComp().decode(payload, Spec.of(x), KEY).count_nonzero())
    assert 8 * payload.nbytes <= 100_000 + count + 8 * 40  # a bitmap at the most


def test_signs_are_no_real_numbers() -> None:
    with pytest.raises(ValueError, match="leaves symbols"):
        AdaComp() >> FP16()


@pytest.mark.parametrize("size", [0, -5])
def test_a_bin_without_elements_is_refused(size) -> None:
    with pytest.raises(ValueError, match="adacomp: bin must be at least 1"):
        AdaComp(size)


def test_without_feedback_it_is_refused(reduce) -> None:
    assert AdaComp().traits.needs_feedback
    with pytest.raises(ValueError, match=r"write ef\("):
        reduce(lift(AdaComp()), [[torch.ones(10)]])
