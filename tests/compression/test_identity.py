import pytest
import torch

from gradwire.compression.identity import Identity
from gradwire.core.key import Key
from gradwire.core.spec import Spec

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_arrives(dtype) -> None:
    x = torch.tensor([1.0, -0.0, torch.finfo(dtype).tiny, torch.finfo(dtype).max], dtype=dtype)
    payload, _ = Identity().encode(x, None, Key(0))
    decoded = Identity().decode(payload, Spec.of(x), Key(0))
    assert torch.equal(decoded, x)
    assert torch.equal(decoded.signbit(), x.signbit())


def test_the_wire_carries_the_tensor_and_a_short_header() -> None:
    payload, _ = Identity().encode(torch.zeros(1000), None, Key(0))
    assert 4000 < payload.nbytes <= 4000 + 16
