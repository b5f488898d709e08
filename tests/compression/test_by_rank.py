"""Each worker's own codec."""

import pytest
import torch

import gradwire
from gradwire.compression import COMPRESSION
from gradwire.core.key import Key
from gradwire.core.spec import Spec

TEXT = 'by_rank({"0": "topk(0.1)", "2-3|5": "qsgd(4)", "*": "fp16"})'


def test_the_sender_decides():
    codec = COMPRESSION.parse(TEXT)
    x = torch.linspace(-1, 1, 100)
    sizes = {}
    for rank in range(7):
        key = Key(0).at(1).private(rank)
        payload, _ = codec.encode(x, codec.init(Spec.of(x)), key)
        sizes[rank] = payload.nbytes
        rule = COMPRESSION.parse(
            {0: "topk(0.1)", 2: "qsgd(4)", 3: "qsgd(4)", 5: "qsgd(4)"}.get(rank, "fp16")
        )
        alone, _ = rule.encode(x, rule.init(Spec.of(x)), key)
        expected = rule.decode(alone, Spec.of(x), key)
        assert torch.equal(codec.decode(payload, Spec.of(x), key), expected)
    assert sizes[2] == sizes[3] == sizes[5] != sizes[1] == sizes[4] == sizes[6] != sizes[0]


def test_a_run_sends_the_bytes_of_each_rule():
    run = gradwire.simulate(
        workers=3,
        steps=3,
        model="mlp((16,))",
        compression='ef(by_rank({"0": "topk(0.01)", "*": "fp16"}))',
        architecture='allreduce("gather")',
        compute="fixed(0.01)",
    )
    sent = [run.ledger.sent_by(rank) for rank in range(3)]
    assert sent[0] < sent[1] / 10
    assert sent[1] == sent[2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('by_rank({"0": "fp16"})', "the last rule"),
        ('by_rank({"*": "fp16", "0": "sign"})', "the last rule"),
        ('by_rank({"a": "fp16", "*": "sign"})', "no list of ranks"),
        ('by_rank({"3-1": "fp16", "*": "sign"})', "no list of ranks"),
        ('by_rank({"0": "ef(sign)", "*": "sign"})', "way of averaging"),
        ("by_rank({})", "table of rules"),
    ],
)
def test_what_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        COMPRESSION.parse(text)


def test_the_notation_comes_back():
    codec = COMPRESSION.parse(TEXT)
    assert COMPRESSION.parse(repr(codec)) == codec
