"""Rules per layer: who gets which, what travels, and what is refused."""

import pytest
import torch

import gradwire
from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.architecture.allreduce.ring import Ring
from gradwire.compression import COMPRESSION
from gradwire.compression.feedback.ef import EF
from gradwire.compression.partition import Partition
from gradwire.compression.quantization.fp16 import FP16
from gradwire.compression.sparsification.topk import TopK
from gradwire.core.errors import NotationError
from gradwire.core.key import Key
from gradwire.core.lifted import lift
from gradwire.core.protocols import Bucket
from gradwire.core.spec import Spec
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.setup import prepare

TENSORS = (
    ("conv.weight", 0, 54, (6, 1, 3, 3)),
    ("conv.bias", 54, 60, (6,)),
    ("bn.weight", 60, 66, (6,)),
    ("fc.weight", 66, 306, (20, 12)),
    ("fc.bias", 306, 326, (20,)),
)
NUMEL = 326
SPEC = Spec((NUMEL,), torch.float64, tensors=TENSORS)


def gradients(size: int, num_steps: int = 1, dtype: torch.dtype = torch.float64):
    return [
        [Key(9).at(step).private(rank).normal(NUMEL).to(dtype) for step in range(num_steps)]
        for rank in range(size)
    ]


def test_it_is_written_as_a_table() -> None:
    rules = COMPRESSION.parse('partition({"bias|bn": "fp16", "*": topk(0.01) >> fp16}, min_size=9)')
    assert rules == Partition({"bias|bn": FP16(), "*": TopK(0.01) >> FP16()}, min_size=9)
    assert repr(rules) == 'partition({"bias|bn": fp16, "*": topk(0.01) >> fp16}, min_size=9)'
    assert rules != Partition({"*": "fp16"})
    # The first match wins, so the order of rules is part of what they are.
    assert Partition({"a": "fp16", "b": "bf16"}) != Partition({"b": "bf16", "a": "fp16"})
    nested = Partition({"*": Partition({"x": "fp16", "*": "bf16"})})
    assert COMPRESSION.parse(repr(nested)) == nested


@pytest.mark.parametrize("architecture", [AllReduce(), Ring()], ids=repr)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_tensor_follows_the_first_rule_that_matches(reduce, size, architecture) -> None:
    inputs = gradients(size)
    rules = Partition({"bias|bn": "identity", "conv*": "fp16", "*": "topk(0.1)"})
    results, _ = reduce(rules, inputs, SPEC, architecture)
    exact = torch.stack([steps[0] for steps in inputs])
    for rank, (result,) in enumerate(results):
        mean = result.mean
        assert torch.equal(mean, results[0][0].mean)
        whole = exact.mean(dim=0)
        assert torch.allclose(mean[54:66], whole[54:66], rtol=0, atol=1e-15)
        assert torch.allclose(mean[306:], whole[306:], rtol=0, atol=1e-15)
        assert torch.allclose(mean[:54], whole[:54], rtol=2**-9, atol=1e-3)
        assert not torch.equal(mean[:54], whole[:54])
        assert result.own()[66:306].count_nonzero() == 24
        assert torch.equal(result.own()[306:], exact[rank, 306:])


def test_the_tensors_of_one_rule_are_encoded_together(reduce) -> None:
    # The largest of both weights: by itself each would keep its own tenth.
    x = torch.linspace(1, 2, NUMEL, dtype=torch.float64)
    results, _ = reduce(Partition({"bias|bn": "identity", "*": "topk(0.1)"}), [[x]], SPEC)
    kept = results[0][0].mean != 0
    assert kept[:54].sum() == 0
    assert kept[66:306].sum() == 29  # a tenth of 54 + 240


def test_small_tensors_are_left_alone(reduce) -> None:
    inputs = gradients(2, dtype=torch.float32)
    results, engine = reduce(Partition({"*": "topk(0.1)"}, min_size=50), inputs, SPEC)
    small = torch.tensor([*range(54, 66), *range(306, 326)])
    exact = torch.stack([steps[0] for steps in inputs]).mean(dim=0)
    assert torch.equal(results[0][0].mean[small], exact[small])
    vector = torch.cat([inputs[0][0][:54], inputs[0][0][66:306]])
    payload, _ = TopK(0.1).encode(vector, None, Key(1))
    # The small ones by an all-reduce, the rest as one payload.
    assert engine.ledger.sent_by(0) <= 32 * 4 + payload.nbytes + 4
    alone, _ = reduce(Partition({"*": "topk(0.1)"}, min_size=1000), inputs, SPEC)
    assert torch.equal(alone[0][0].mean, exact)


@pytest.mark.parametrize("text", ["topk(0.05)", "powersgd(1)", "sign"])
def test_feedback_around_the_rules_or_inside_them_loses_nothing(reduce, text) -> None:
    inputs = gradients(3, num_steps=5)
    everything = sum(x for steps in inputs for x in steps)
    outside = EF(Partition({"bias": "identity", "*": text}))
    inside = Partition({"bias": "identity", "*": f"ef({text})"})
    a, _ = reduce(outside, inputs, SPEC)
    b, _ = reduce(inside, inputs, SPEC)
    for step in range(5):
        assert torch.allclose(a[0][step].mean, b[0][step].mean, rtol=0, atol=1e-12)
    held = sum(steps[-1].state["residual"] for steps in a)
    applied = 3 * sum(result.mean for result in a[0])
    assert torch.allclose(applied + held, everything, rtol=0, atol=1e-12)


def test_rules_inside_see_the_shapes_of_their_tensors(reduce) -> None:
    (((result,),), _) = reduce(Partition({"fc.w": "powersgd(1)", "*": "fp16"}), gradients(1), SPEC)
    assert torch.linalg.matrix_rank(result.mean[66:306].view(20, 12)) == 1


@pytest.mark.few
@pytest.mark.parametrize("scheduling", ["sequential", 'sequential("layer")'])
def test_it_trains_with_the_names_of_the_model(scheduling) -> None:
    common = {"steps": 3, "batch_size": 8, "workers": 2, "model": "mlp((16,))"}
    common |= {"compute": "fixed(0.001)", "scheduling": scheduling}
    plain = gradwire.simulate(**common)
    same = gradwire.simulate(**common, compression='partition({"bias": "identity", "*": identity})')
    assert torch.equal(same.params, plain.params)
    low = gradwire.simulate(**common, compression="ef(powersgd(2))")
    assert low.summary["bytes_sent"] < 0.5 * plain.summary["bytes_sent"]


def test_a_bucket_knows_the_tensors_in_it() -> None:
    plan = prepare(Config(model="mlp((16,))", workers=2, steps=1)).plan
    tensors = plan.task.layout.tensors
    whole = plan.spec(plan.buckets()[0], torch.float32)
    assert whole.tensors == tuple(map(tuple, tensors))
    first, second = tensors[0], tensors[1]
    cut = plan.spec(Bucket("cut", first.start + 3, second.stop), torch.float32)
    assert cut.tensors == (
        (first.name, 0, first.stop - 3, (first.stop - 3,)),  # a piece of a matrix is a vector
        (second.name, first.stop - 3, second.stop - 3, second.shape),
    )
    assert cut == Spec((second.stop - 3,), torch.float32)  # the tensors are no part of equality


def test_a_rule_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'gru' matches no tensor; the tensors are .*weight"):
        gradwire.simulate(steps=1, compression='partition({"gru": "fp16", "*": "identity"})')
    with pytest.raises(ValueError, match=r"'a.w' matches no tensor; all it would .* taken"):
        Partition({"a": "fp16", "a.w": "bf16", "*": "fp16"}).check_names(["a.w", "b"])
    with pytest.raises(ValueError, match=r"'c' matches no tensor"):  # also behind feedback
        EF(Partition({"c": "fp16", "*": "fp16"})).check_names(["a", "b"])
    Partition({"a": "fp16", "*": "bf16"}).check_names(["a"])  # the rest may be nothing


def test_a_tensor_without_a_rule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no rule for 'fc.weight'.*Add"):
        Partition({"bias|bn|conv": "fp16"}).init(SPEC, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("partition({})", "takes a table of rules"),
        ("partition(3)", "rules must be Mapping"),
        ('partition({"*": "fp16", "a": "bf16"})', "comes after"),
        ('partition({"a||b": "fp16"})', "empty pattern"),
        ('partition({"*": "nosuch"})', "unknown compression"),
        ('partition({"*": 3})', "must be a string such as"),
        ('partition({"*": fp16, "*": bf16})', "twice"),
        ("partition({1: fp16})", "must be strings"),
        ('partition({**{"a": fp16}})', "must be strings"),
        ('partition({"*": "fp16"}, min_size=-1)', "min_size"),
        ('{"*": fp16}', "is not a compression"),
        ('topk({"*": fp16})', "density must be float"),
    ],
)
def test_nonsense_is_refused(text, message) -> None:
    with pytest.raises(NotationError, match=message):
        COMPRESSION.parse(text)


def test_a_vector_without_names_is_the_rest(reduce) -> None:
    x = gradients(1)[0][0]
    results, _ = reduce(lift(Partition({"bias": "fp16", "*": "identity"})), [[x]])
    assert torch.equal(results[0][0].mean, x)


def test_rules_keep_their_memories_apart() -> None:
    reducer = COMPRESSION.parse('partition({"b": ef(sign), "*": ef(topk(0.5))})')
    tensors = (("a", 0, 4, (4,)), ("b", 4, 8, (4,)))
    spec = Spec((8,), torch.float64, tensors=tensors)
    fresh = reducer.init(spec, 1)
    rules = tuple(
        {**rule, "residual": torch.full((4,), float(number), dtype=torch.float64)}
        for number, rule in enumerate(fresh["rules"], start=1)
    )
    memories = reducer.remembered([{**fresh, "rules": rules}], spec)
    held = sorted(memory.vectors[0].tolist() for memory in memories.values())
    assert held == [[0.0] * 4 + [1.0] * 4, [2.0] * 4 + [0.0] * 4]  # in the places of the bucket
    (again,) = reducer.restored([fresh], memories, spec)
    assert [rule["residual"].tolist() for rule in again["rules"]] == [[1.0] * 4, [2.0] * 4]
