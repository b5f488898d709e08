"""The examples of families in CONTRIBUTING are codecs that work as they stand there."""

import re
from pathlib import Path

import pytest
import torch

from gradwire.core.codec import Codec, unpack
from gradwire.core.errors import NonFiniteError
from gradwire.core.fusion import decode_mean, encode_feedback
from gradwire.core.key import Key
from gradwire.core.spec import Spec

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
KEY = Key(4)


def example(name: str) -> Codec:
    page = PAGE.read_text().split("## Families")[1]
    (code,) = (c for c in re.findall(r"```python\n(.*?)```", page, re.S) if f"class {name}(" in c)
    found: dict = {"__name__": "example"}
    exec(compile(code, str(PAGE), "exec"), found)
    return found[name]()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("numel", [0, 1, 77])
@pytest.mark.parametrize("name", ["Thirds", "AboveMean"])
def test_they_encode_decode_feed_back_and_average(name, numel, dtype) -> None:
    codec, x = example(name), KEY.normal(numel).to(dtype)
    spec = Spec.of(x)
    payload, state = codec.encode(x, codec.init(spec), KEY)
    decoded = codec.decode(unpack(codec, payload.buffer.clone(), spec), spec, KEY)
    if name == "Thirds":
        assert torch.equal(decoded, x.round().clamp(-1, 1))
    else:
        sent = x.abs() >= x.double().abs().mean()
        assert torch.equal(decoded, torch.where(sent, x, torch.zeros_like(x)))
    again, lost, _ = encode_feedback(codec, x, torch.zeros_like(x), state, KEY)
    assert torch.equal(again.buffer, payload.buffer)
    assert torch.equal(lost, x - decoded)
    assert torch.equal(decode_mean(codec, [payload] * 2, spec, [KEY] * 2), decoded)


@pytest.mark.parametrize("name", ["Thirds", "AboveMean"])
def test_they_refuse_what_is_not_finite(name) -> None:
    with pytest.raises(NonFiniteError):
        example(name).encode(torch.tensor([1.0, torch.nan]), None, KEY)
