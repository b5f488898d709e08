"""Encoding of all workers at once: the payloads, virtual times and bytes of one after another.

That is for accelerators; here the rows are encoded on the CPU, by the reference.
"""

from typing import Any

import pytest
import torch

import gradwire
from gradwire import kernels
from gradwire.compression import COMPRESSION
from gradwire.compression.feedback import dgc
from gradwire.core import coded_rows
from gradwire.core.batched import form_of
from gradwire.core.codec import unpack
from gradwire.core.coded import encode
from gradwire.core.coded_rows import EncodedRows
from gradwire.core.errors import NonFiniteError, WireError
from gradwire.core.key import Key
from gradwire.core.metering import metered
from gradwire.core.node import Node
from gradwire.core.payload_rows import moved
from gradwire.core.rows import rows_in_memory, split_rows
from gradwire.core.spec import Spec
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.coding_time import Cost, CostTable, ModelledCoding
from gradwire.runtime.virtual.engine import VirtualEngine

SELECTING = ("topk(0.05)", "sampledk(0.05)")
ROWS = ("sign", "sign(bucket=64)", "qsgd(bits=4)", "qsgd(bits=8, bucket=64)", *SELECTING)
RUNS: dict[str, dict[str, Any]] = {
    "sign": {"compression": "ef(sign)"},
    "buckets": {"compression": "ef(sign(bucket=64))", "compute": "lognormal(0.01)"},
    "levels": {"compression": "qsgd(bits=4)", "what_if": ("1Gbit",)},
    "fed levels": {"compression": "ef(qsgd(bits=4))"},
    "topk": {"compression": "ef(topk(0.01))", "what_if": ("1Mbit",)},
    "topk, layer by layer": {"compression": "ef(topk(0.05))", "scheduling": "wfbp"},
    "dgc": {"compression": "dgc(0.05)"},
    "dgc, nesterov": {
        "compression": "dgc(topk(0.05), nesterov=True)",
        "compute": "lognormal(0.01)",
    },
    "dgc, clipped": {"compression": "dgc(0.05, clip=0.5, masking=False)"},
    "sampled": {"compression": "ef(sampledk(0.05))", "what_if": ("1Mbit",)},
    "choco": {"architecture": "gossip(ring, choco(0.3))", "compression": "topk(0.05)"},
    "choco, sampled": {
        "architecture": "gossip(ring, choco(0.3))",
        "compression": "sampledk(0.05)",
        "compute": "lognormal(0.01)",
    },
    "dcd": {"architecture": "gossip(ring, dcd)", "compression": "qsgd(bits=4)"},
    "local": {"compression": "ef(topk(0.05))", "synchronization": "localsgd(2)"},
    "servers": {"compression": "ef(sign)", "architecture": "parameter_server"},
    "a worker crashes": {
        "compression": "ef(topk(0.05))",
        "architecture": "parameter_server",
        "synchronization": "asp",
        "faults": ("crash(2, at=0.021, rejoin=0.03)",),
        "heartbeat": "10ms",
    },
}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(coded_rows, "_DEVICES", frozenset({"cpu", "cuda"}))
    return monkeypatch


def run(**settings: Any) -> tuple[Any, ...]:
    usual: dict[str, Any] = {"model": "mlp((24,))", "workers": 5, "batch_size": 8, "steps": 6}
    usual |= {"compute": "fixed(0.01)", "eval_every": 3, "coding": "model"}
    own = gradwire.simulate(**{**usual, **settings})
    rows = [(r["virtual_time_s"], r["virtual_times_s"], r["bytes_sent"]) for r in own.metrics]
    return own.params.tolist(), rows, own.ledger.snapshot()


@pytest.mark.parametrize("name", RUNS)
def test_runs_are_those_of_one_encode_after_another(name: str, on_cpu: pytest.MonkeyPatch) -> None:
    settings = RUNS[name]
    batches: list[int] = []
    together = EncodedRows.run

    def counted(form: EncodedRows, calls: Any) -> Any:
        batches.append(len(calls))
        return together(form, calls)

    on_cpu.setattr(EncodedRows, "run", counted)
    held = run(**settings)
    assert not batches or max(batches) > 1
    if name in ("sign", "levels", "fed levels", "topk", "dgc", "sampled", "choco", "dcd", "local"):
        assert max(batches) == 5  # all workers at once
    on_cpu.setattr(coded_rows, "_DEVICES", frozenset())
    assert held == run(**settings)


def residual_of(feedback: str, key: Key, row: int, numel: int) -> kernels.Residual | None:
    if feedback == "none":
        return None
    kept, velocity = 0.3 * key.child("kept").child(row).normal(2 * numel).view(2, -1)
    if feedback == "residual":
        return kept
    return kernels.Motion(kept, velocity, torch.full_like(kept, torch.nan), 0.9, masks=True)


@pytest.mark.parametrize(
    ("text", "feedback"),
    [
        *((text, feedback) for text in ROWS for feedback in ("none", "residual")),
        *((text, "motion") for text in SELECTING),
    ],
)
def test_rows_are_encoded_as_vectors_are(text: str, feedback: str) -> None:
    assert_rows_are_encoded_as_vectors_are(text, feedback)


@pytest.mark.parametrize("feedback", ["none", "residual", "motion"])
@pytest.mark.parametrize("text", SELECTING)
def test_rows_are_encoded_as_vectors_are_by_triton(
    text: str, feedback: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setenv("GRADWIRE_KERNELS", "triton")
    assert_rows_are_encoded_as_vectors_are(text, feedback)


def assert_rows_are_encoded_as_vectors_are(text: str, feedback: str) -> None:
    codec, spec, key = COMPRESSION.parse(text), Spec((1003,), torch.float32), Key(seed=3, step=2)
    x = key.child("x").normal(4 * 1003).view(4, -1)
    calls, alone = (
        [
            (codec, x[r], residual_of(feedback, key, r, 1003), None, key.private(r), True)
            for r in range(4)
        ]
        for _ in range(2)
    )
    together = EncodedRows().run(calls)
    assert together is not None
    for call, own, ((payload, lost, state), work) in zip(alone, calls, together):
        with metered() as expected_work:
            expected, expected_lost, _ = encode(*call)
        assert torch.equal(payload.buffer, expected.buffer)
        assert state is None
        assert list(work) == list(expected_work)
        assert (lost is None) == (feedback == "none")
        if lost is not None:
            assert torch.equal(lost, expected_lost)
        if isinstance(own[2], kernels.Motion):
            assert torch.equal(own[2].moved, call[2].moved)
        received = unpack(codec, payload.buffer, spec)
        assert torch.equal(
            codec.decode(received, spec, call[4]), codec.decode(expected, spec, call[4])
        )


@pytest.mark.parametrize("text", ["dgc(0.05)", "dgc(topk(0.05), nesterov=True)"])
def test_vectors_of_feedback_stay_rows(text: str, on_cpu: pytest.MonkeyPatch) -> None:
    """So that nothing is copied to encode them together in the next step."""
    method, key = COMPRESSION.parse(text), Key(seed=3)
    states = [method.init(Spec((1003,), torch.float32), 4) for _ in range(4)]
    form = form_of(dgc.make_motion)
    assert form is not None
    for step in range(3):
        x = split_rows(key.at(step).normal(4 * 1003).view(4, -1))
        arguments = [(method, x[r], states[r], 4) for r in (2, 0, 3, 1)]
        assert len({form.keys(args)[1] for args in arguments}) == 1  # type: ignore[index]
        motions = form.run(arguments)
        assert motions is not None
        calls = [
            (method.compression, own, motion, None, key.private(r), True)
            for r, (_, own, _, _), motion in zip((2, 0, 3, 1), arguments, motions)
        ]
        assert len({EncodedRows().keys(args) for args in calls}) == 1
        results = EncodedRows().run(calls)
        assert results is not None
        for r, motion, ((_, lost, _), _) in zip((2, 0, 3, 1), motions, results):
            states[r] = {**states[r], "residual": lost, "velocity": motion.moved}
        for name in ("residual", "velocity"):
            assert rows_in_memory([state[name] for state in states]) is not None


def test_moved_payloads_have_their_bytes_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, spec, key = COMPRESSION.parse("topk(0.1)"), Spec((501,), torch.float32), Key(seed=1)
    payloads = [codec.encode(key.child(r).normal(501), None, key)[0] for r in range(3)]
    there = moved(payloads, torch.device("cpu"))  # as it would be on an accelerator
    for own, other in zip(payloads, there):
        assert torch.equal(own.buffer, other.buffer)
        assert other.buffer.data_ptr() != own.buffer.data_ptr()
        assert kernels.noted(other.buffer, "host") is own.buffer
        received = unpack(codec, other.buffer, spec)
        assert torch.equal(codec.decode(received, spec, key), codec.decode(own, spec, key))
    there[0].buffer[-1] ^= 1  # then what is known of them holds no more
    with pytest.raises(WireError, match="checksum"):
        unpack(codec, there[0].buffer, spec)


def test_of_held_calls_the_one_that_fails_raises(on_cpu: pytest.MonkeyPatch) -> None:
    codec = COMPRESSION.parse("ef(topk(0.1))").inner

    async def program(node: Node) -> str:
        x = torch.ones(100)
        if node.rank == 1:
            x[3] = float("nan")
        try:
            await node.call(encode, codec, x, None, None, Key(seed=1).private(node.rank), True)
        except NonFiniteError as error:
            return str(error)
        return f"{await node.now():.6f}"

    cost = {operation: Cost(1e-3, 0.0, 0.0) for operation in ("encode", "decode", "vector", "pack")}
    table = CostTable({}, {}, cost, {**cost, "encode_feedback": cost["encode"]})
    engine = VirtualEngine(Network((0.0,) * 3, (1e9,) * 3), coding=ModelledCoding(table))
    with pytest.warns(UserWarning, match="no entry for topk"):
        results = engine.run([program] * 3)
    assert results[0] == results[2] == "0.002000"  # encoding and packing
    assert "NaN or infinity in a tensor of shape [100]" in results[1]


def test_an_error_that_no_call_is_to_blame_for_is_raised(on_cpu: pytest.MonkeyPatch) -> None:
    def broken(form: EncodedRows, calls: Any) -> Any:
        raise RuntimeError("a kernel is broken")

    on_cpu.setattr(EncodedRows, "run", broken)
    with pytest.raises(RuntimeError, match="a kernel is broken"):
        run(compression="ef(sign)")


def test_a_group_that_is_refused_is_encoded_one_after_another(
    on_cpu: pytest.MonkeyPatch,
) -> None:
    on_cpu.setattr(EncodedRows, "run", lambda form, calls: None)
    refused = run(compression="ef(topk(0.05))")
    on_cpu.setattr(coded_rows, "_DEVICES", frozenset())
    assert refused == run(compression="ef(topk(0.05))")
