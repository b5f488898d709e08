"""Entries that interpreted Triton kernels write into a payload, and out of it: the bytes and the
vectors of the reference, one read of the device each, and the reference's words for damaged bytes.
"""

import pytest
import torch

from gradwire import kernels
from gradwire.compression import COMPRESSION
from gradwire.compression.sparsification import _entries, _families
from gradwire.core.errors import WireError
from gradwire.core.fusion import encode_feedback
from gradwire.core.key import Key
from gradwire.core.payload import Payload
from gradwire.core.spec import Spec

pytest.importorskip("triton", reason="Triton is not installed")

KEY = Key(seed=5, step=2).private(3).child("fc")


@pytest.fixture(autouse=True)
def _triton(monkeypatch):
    monkeypatch.setenv("GRADWIRE_KERNELS", "triton")


def vector(numel, seed=0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def clustered(numel):
    """Large at the front: Elias' code of the gaps is the shortest."""
    x = 0.001 * vector(numel)
    x[: numel // 200] += 9
    x[-1] = 10.0
    return x


def encoded(text, x):
    codec = COMPRESSION.parse(text)
    return codec.encode(x, codec.init(Spec.of(x)), KEY)[0]


@pytest.mark.parametrize("text", ["topk(0.01)", "topk(0.3)", "sampledk(0.03)", "gaussiank(0.05)"])
@pytest.mark.parametrize("numel", [300, 9001, 70_000])
def test_payloads_written_at_once_are_those_made_of_parts(monkeypatch, text, numel):
    codec, results = COMPRESSION.parse(text), []
    direct = []
    for write in (_entries.entries_payload, lambda *_: None):
        monkeypatch.setattr(
            _families,
            "entries_payload",
            lambda *given, write=write: direct.append(write(*given)) or direct[-1],
        )
        x, residual = vector(numel), vector(numel, 1)
        payload, lost, _ = encode_feedback(codec, x, residual, codec.init(Spec.of(x)), KEY)
        found = [payload.nbytes, dict(payload.parts), payload.buffer, lost]
        results.append(found)
    made, parts = results
    assert direct[0] is not None
    assert direct[1] is None
    assert made[0] == parts[0]
    for name, part in made[1].items():
        assert torch.equal(part, parts[1][name])
        assert part.dtype == parts[1][name].dtype
    assert torch.equal(made[2], parts[2])
    assert torch.equal(made[3], parts[3])


def test_one_read_of_the_device_for_each_direction_and_none_of_own_bytes(monkeypatch):
    reads, to_list = [], torch.Tensor.tolist
    x = vector(30_000)
    payload = encoded("topk(0.01)", x)  # what Triton interprets reads on its own account
    codec = COMPRESSION.parse("topk(0.01)")
    copied = {name: part.clone() for name, part in payload.parts.items()}
    others = Payload.deferred(copied, payload.context)

    def counted(self):
        reads.append("tolist")
        return to_list(self)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)

    def noticed(name):
        was = getattr(torch.Tensor, name)
        return lambda self, *rest: reads.append(name) or was(self, *rest)

    for name in ("item", "__int__", "__bool__", "__float__", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, noticed(name))
    from gradwire.kernels.triton import _stages, gaps

    for module in (_stages, gaps):  # neither bytes nor numbers depend on what is not computed here
        monkeypatch.setattr(module, "launch", _quiet(module.launch, reads))
    codec.decode(payload, Spec.of(x), KEY)
    assert not reads
    codec.decode(others, Spec.of(x), KEY)
    assert reads == ["tolist"]
    reads.clear()
    codec.encode(x, None, KEY)
    assert reads == ["tolist"]


def _quiet(launch, reads):
    def run(*given, **options):
        before = len(reads)
        launch(*given, **options)
        del reads[before:]

    return run


@pytest.mark.parametrize(
    ("text", "make", "is_direct"),
    [
        ("topk(0.01)", vector, True),
        ("sampledk(0.03)", vector, True),
        ("topk(0.4)", vector, False),  # a bitmap
        ("topk(0.005)", clustered, False),  # Elias' code
        ("topk(1.0)", vector, False),
    ],
    ids=lambda given: getattr(given, "__name__", str(given)),
)
def test_decoding(monkeypatch, text, make, is_direct):
    numel, codec = 9000, COMPRESSION.parse(text)
    x = make(numel)
    payload, found = encoded(text, x), []
    monkeypatch.setattr(
        _families,
        "scattered_entries",
        lambda *given: found.append(_entries.scattered_entries(*given)) or found[-1],
    )
    decoded = codec.decode(payload, Spec.of(x), KEY)
    assert (found[0] is not None) == is_direct
    monkeypatch.setenv("GRADWIRE_KERNELS", "reference")
    assert torch.equal(decoded, codec.decode(payload, Spec.of(x), KEY))


@pytest.mark.parametrize("text", ["topk(0.02)", "sampledk(0.02)"])
def test_bytes_changed_after_they_were_made_are_checked(text):
    x = vector(6000)
    payload = encoded(text, x)
    codec = COMPRESSION.parse(text)
    assert kernels.noted(payload.parts["indices"], "rice")[:2] == (6000, 120)
    payload.parts["indices"][-1] = 0  # no sender ends with zeros
    assert kernels.noted(payload.parts["indices"], "rice") is None
    with pytest.raises(WireError):
        codec.decode(payload, Spec.of(x), KEY)


@pytest.mark.parametrize("text", ["topk(0.02)", "sampledk(0.02)"])
def test_damaged_codes_are_refused_in_the_same_words(monkeypatch, text):
    numel, codec = 6000, COMPRESSION.parse(text)
    x = vector(numel)
    payload = encoded(text, x)
    code = payload.parts["indices"]
    refused, read = 0, 0
    for trial in range(60):
        generator = torch.Generator().manual_seed(trial)
        given, place = code.clone(), int(torch.randint(len(code), (1,), generator=generator))
        if trial % 5 == 0:
            given = given[:place]
        elif trial % 5 == 1:
            given = torch.cat([given, torch.zeros(trial % 3, dtype=torch.uint8)])
        elif trial % 5 == 2:
            given[: 3 + trial % 2] = torch.randint(256, (3 + trial % 2,), generator=generator)
        else:
            given[place] ^= 1 << int(torch.randint(8, (1,), generator=generator))
        outcomes = []
        for backend in ("triton", "reference"):
            monkeypatch.setenv("GRADWIRE_KERNELS", backend)
            parts = {"indices": given, "values": payload.parts["values"]}
            try:
                outcomes.append(codec.decode(Payload.pack(parts), Spec.of(x), KEY).tolist())
            except WireError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]
        refused += isinstance(outcomes[0], str)
        read += not isinstance(outcomes[0], str)
    assert refused > 20
    assert read > 3


def test_arguments_are_checked():
    values = torch.ones(3)
    code = torch.zeros(9, dtype=torch.uint8)
    with pytest.raises(ValueError, match="more than 5 bytes"):
        kernels.scatter_rice(code[:5], 4, values, 10, torch.zeros(10))
    with pytest.raises(ValueError, match=r"\[10\] for its result"):
        kernels.scatter_rice(code, 0, values, 10, torch.zeros(9))
    with pytest.raises(ValueError, match="0 values"):
        kernels.scatter_rice(code, 0, values[:0], 10, torch.zeros(10))
    words, indices = torch.zeros(9, dtype=torch.int32), torch.arange(3)
    with pytest.raises(ValueError, match="int32 words"):
        kernels.write_entries(words.long(), 0, indices, 1, b"1", values, 0)
    with pytest.raises(ValueError, match="1 to 8 bytes"):
        kernels.write_entries(words, 0, indices, 1, b"", values, 0)
