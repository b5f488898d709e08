"""Each worker's own codec."""

import pytest
import torch

import gradwire
from gradwire.compression import COMPRESSION
from gradwire.compression.by_rank import at_bandwidths
from gradwire.core.key import Key
from gradwire.core.spec import Spec
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.setup import prepare

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


BY_BANDWIDTH = 'ef(by_rank({">=1Gbit": "fp16", "<20Mbit": "topk(0.01)", "*": "topk(0.1)"}))'


def test_each_worker_has_the_rule_of_its_bandwidth():
    settings = {
        "workers": 4,
        "steps": 3,
        "model": "mlp((16,))",
        "architecture": 'allreduce("gather")',
        "compute": "fixed(0.01)",
        "bandwidth": "1Gbit,10Mbit,2Gbit,100Mbit",
    }
    by_rank = 'ef(by_rank({"0|2": "fp16", "1": "topk(0.01)", "*": "topk(0.1)"}))'
    run = gradwire.simulate(**settings, compression=BY_BANDWIDTH)
    same = gradwire.simulate(**settings, compression=by_rank)
    assert torch.equal(run.params, same.params)
    sent = [run.ledger.sent_by(rank) for rank in range(4)]
    assert sent == [same.ledger.sent_by(rank) for rank in range(4)]
    assert sent[1] < sent[3] < sent[0] == sent[2]
    assert COMPRESSION.parse(run.config.compression) == COMPRESSION.parse(BY_BANDWIDTH)


def test_with_a_topology_the_uplink_counts():
    plan = prepare(
        Config(
            workers=4,
            model="mlp((16,))",
            steps=1,
            topology='wan(2, uplink="5Mbit,2Gbit")',
            bandwidth="10Gbit",
            compute="fixed(0.01)",
            compression='ef(by_rank({"<10Mbit": "topk(0.01)", "*": "fp16"}))',
        )
    ).plan
    assert repr(plan.reducer) == 'ef(by_rank({"0|1": topk(0.01), "*": fp16}))'


def test_rules_come_in_order_and_those_of_no_worker_are_left_out():
    rules = 'by_rank({">=10Gbit": "sign", ">=1Gbit": "fp16", "1": "qsgd(4)", "*": "topk(0.1)"})'
    found = at_bandwidths(COMPRESSION.parse(rules), [1.25e8, 1.25e8, 1e6])
    assert repr(found) == 'by_rank({"0|1": fp16, "*": topk(0.1)})'


def test_real_processes_are_not_told_their_bandwidth():
    with pytest.raises(ValueError, match="rules by bandwidth, which are known in runs on the sim"):
        prepare(Config(engine="process", workers=2, compression=BY_BANDWIDTH))


@pytest.mark.parametrize("key", [">=fast", "<", ">=0bit"])
def test_what_is_no_bandwidth_is_refused(key):
    with pytest.raises(ValueError, match=r"bandwidth .* is not understood"):
        COMPRESSION.parse(f'by_rank({{"{key}": "fp16", "*": "sign"}})')


def test_ranges_may_be_long():
    rules = COMPRESSION.parse('by_rank({"2-99999999999": "topk(0.1)", "*": "fp16"})')
    assert [rules.number_of(rank) for rank in (0, 1, 2, 10**9, 10**12)] == [1, 1, 0, 0, 1]
