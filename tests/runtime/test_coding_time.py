"""The model of coding time: three numbers per operation, and nothing of this machine."""

import time
import warnings
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from gradwire.compression.quantization.sign import Sign
from gradwire.compression.sparsification.topk import TopK
from gradwire.core.errors import GradwireWarning
from gradwire.core.fusion import encode_feedback
from gradwire.core.group import concatenate
from gradwire.core.key import Key
from gradwire.core.node import Node
from gradwire.core.rows import split_vector
from gradwire.core.spec import Spec
from gradwire.experiment.run.threads import use_threads
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.coding_time import (
    CodingTime,
    Cost,
    CostTable,
    MeasuredCoding,
    ModelledCoding,
)
from gradwire.runtime.virtual.engine import VirtualEngine

X = Key(1).normal(1000)
SIGN = {"encode": Cost(1.0, 0.001, 0.0), "decode": Cost(10.0, 0.0, 0.01)}
OTHERS = {name: Cost(0.5, 0.0, 0.001) for name in ("vector", "pack", "unpack")}
DEFAULT = {"encode": Cost(7.0, 0.0, 0.0), "decode": Cost(5.0, 0.0, 0.0)}


def square(x):
    return x * x


def table(**functions: Cost) -> CostTable:
    named = {f"{square.__module__}.{name}": cost for name, cost in functions.items()}
    wide = {"encode": Cost(2.0, 0.0, 0.0), "decode": Cost(2.0, 0.0, 0.0)}
    return CostTable({"sign": SIGN, "sign(bucket=64)": wide}, named, OTHERS, DEFAULT)


def seconds_of(function, *args, coding: CodingTime | None = None) -> float:
    async def program(node: Node) -> None:
        await node.call(function, *args)

    engine = VirtualEngine(Network.uniform(1), coding=coding or ModelledCoding(table()))
    engine.run([program])
    return engine.now


def test_a_codec_costs_what_the_table_says() -> None:
    codec = Sign()
    payload, _ = codec.encode(X, None, Key(0))
    assert seconds_of(codec.encode, X, None, Key(0)) == pytest.approx(1.0 + 0.001 * 1000)
    decoding = seconds_of(codec.decode, payload, Spec.of(X), Key(0))
    assert decoding == pytest.approx(10.0 + 0.01 * payload.nbytes)


def test_an_example_may_have_an_entry_of_its_own() -> None:
    assert seconds_of(Sign(bucket=64).encode, X, None, Key(0)) == 2.0
    assert seconds_of(Sign(bucket=32).encode, X, None, Key(0)) == pytest.approx(2.0)  # of sign


def test_what_has_no_cost_of_its_own_costs_its_parts() -> None:
    codec = Sign()
    payload, *_ = encode_feedback(codec, X, X, None, Key(0))
    both = 1.0 + 0.001 * 1000 + 10.0 + 0.01 * payload.nbytes
    assert seconds_of(encode_feedback, codec, X, X, None, Key(0)) == pytest.approx(both)


def test_a_function_costs_the_bytes_it_reads_and_makes() -> None:
    assert seconds_of(torch.add, X, X) == pytest.approx(0.5 + 0.001 * 8000)  # X counts once
    assert seconds_of(square, X) == pytest.approx(0.5 + 0.001 * 8000)
    own = ModelledCoding(table(square=Cost(3.0, 0.0, 0.0)))
    assert seconds_of(square, X, coding=own) == 3.0
    assert seconds_of(lambda x: float(x.sum()), X) == pytest.approx(0.5 + 0.001 * 4000)


def encode_twice(codec, x):
    return [codec.encode(x, None, Key(0))[0] for _ in range(2)]


def test_a_function_around_codecs_costs_its_reports_and_bytes_besides() -> None:
    codec = Sign()
    payload, _ = codec.encode(X, None, Key(0))
    alone = seconds_of(encode_twice, codec, X)
    assert alone == pytest.approx(2 * (1.0 + 0.001 * 1000))  # no entry: the codec alone
    own = ModelledCoding(table(encode_twice=Cost(3.0, 0.25, 0.001)))
    touched = 4000 + 2 * sum(part.nbytes for part in payload.parts.values())
    besides = 3.0 + 2 * 0.25 + 0.001 * touched
    assert seconds_of(encode_twice, codec, X, coding=own) == pytest.approx(alone + besides)


def test_parts_put_together_cost_as_much_without_a_copy() -> None:
    parts = split_vector(X, 4)
    assert concatenate(parts) is X
    copied = tuple(part.clone() for part in parts)
    assert seconds_of(concatenate, parts) == seconds_of(concatenate, copied)
    assert seconds_of(concatenate, parts) == pytest.approx(0.5 + 0.001 * 8000)


def test_partial_functions_count_as_what_they_call() -> None:
    own = ModelledCoding(table(square=Cost(3.0, 0.0, 0.001)))
    assert seconds_of(partial(square, X), coding=own) == pytest.approx(3.0 + 0.001 * 8000)


def test_measured_coding_counts_the_running_time_of_one_thread() -> None:
    with use_threads(1):
        assert seconds_of(time.sleep, 0.3, coding=MeasuredCoding()) < 0.2  # nothing ran
    with use_threads(2):
        assert seconds_of(time.sleep, 0.3, coding=MeasuredCoding()) >= 0.3


def test_what_does_nothing_costs_nothing() -> None:
    assert seconds_of(lambda x: None, X) == 0.0
    assert seconds_of(lambda x: (x, {"same": x}), X) == 0.0
    assert seconds_of(lambda x: x.reshape(-1)[3:], X) == 0.0  # a view


def test_slower_machines_take_longer() -> None:
    slow = ModelledCoding(table(), slowdown=3.0)
    assert seconds_of(torch.add, X, X, coding=slow) == pytest.approx(3 * 8.5)
    assert seconds_of(Sign().encode, X, None, Key(0), coding=slow) == pytest.approx(3 * 2.0)


def test_the_time_that_work_takes_here_does_not_matter(monkeypatch) -> None:
    ticks = iter(range(0, 10**9, 1000))
    monkeypatch.setattr(CodingTime, "clock", staticmethod(lambda: next(ticks)))
    assert seconds_of(torch.add, X, X) == pytest.approx(8.5)


def test_ranks_that_share_work_all_pay() -> None:
    async def program(node: Node) -> float:
        await node.share(torch.add, X, X)
        return await node.now()

    engine = VirtualEngine(Network.uniform(3), coding=ModelledCoding(table()))
    assert engine.run([program] * 3) == pytest.approx([8.5] * 3)


def test_an_unknown_codec_is_charged_and_named_once() -> None:
    @dataclass(frozen=True, repr=False)
    class Mine(TopK):
        pass

    coding = ModelledCoding(table())
    codec = Mine(0.1)
    with pytest.warns(GradwireWarning, match="no entry for mine.*gradwire codecs --costs"):
        assert seconds_of(codec.encode, X, codec.init(Spec.of(X)), Key(0), coding=coding) == 7.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seconds_of(codec.encode, X, codec.init(Spec.of(X)), Key(0), coding=coding)


def test_modelled_time_is_part_of_the_trace() -> None:
    async def program(node: Node) -> None:
        await node.call(torch.add, X, X)

    engine = VirtualEngine(Network.uniform(2), coding=ModelledCoding(table()), record=True)
    engine.run([program] * 2)
    again = VirtualEngine(Network.uniform(2))
    again.run([engine.trace.replay] * 2)
    assert again.now == engine.now == pytest.approx(8.5)
