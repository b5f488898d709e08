"""What is known of payloads that were encoded together: decoding gives what their bytes say."""

import copy

import pytest
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compression import COMPRESSION
from gradwire.core import decoded_rows
from gradwire.core.codec import Codec
from gradwire.core.coded import decode, decode_shared, mean_of_decoded
from gradwire.core.coded_rows import EncodedRows
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.metering import metered
from gradwire.core.payload_rows import moved
from gradwire.core.rows import row_of
from gradwire.core.spec import Spec

N, D = 5, 701
KEY, SPEC = Key(seed=3, step=2), Spec((D,), torch.float32)
CODECS = (
    "topk(0.05)",
    "topk(0.002)",
    "sampledk(0.05)",
    "sampledk(0.5)",
    "qsgd(bits=4)",
    "qsgd(7, bucket=64)",
)


def encoded(text: str) -> tuple[Codec, tuple[Tensor, ...]]:
    codec = COMPRESSION.parse(text)
    x = KEY.child("x").normal(N * D).view(N, D)
    x[3, 5:] = 0  # then few are sent, if the codec may
    calls = [(codec, x[r], None, None, KEY.private(r), True) for r in range(N)]
    results = EncodedRows().run(calls)
    assert results is not None
    return codec, tuple(payload.buffer for (payload, _, _), _ in results)


def unknown(buffers: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The bytes as they would be received."""
    return tuple(buffer.clone() for buffer in buffers)


@pytest.mark.parametrize("text", CODECS)
@pytest.mark.parametrize("count", [1, 2, N])
def test_means_are_those_of_received_bytes(text: str, count: int) -> None:
    codec, buffers = encoded(text)
    buffers, senders = buffers[::-1][:count], tuple(range(count))
    assert decoded_rows.known_rows(codec, SPEC, buffers) is not None
    with metered() as work:
        mean = mean_of_decoded(codec, SPEC, KEY, buffers, senders)
    with metered() as expected_work:
        expected = mean_of_decoded(codec, SPEC, KEY, unknown(buffers), senders)
    assert torch.equal(mean, expected)
    assert work == expected_work


@pytest.mark.parametrize("text", CODECS)
def test_vectors_are_those_of_received_bytes(text: str) -> None:
    codec, buffers = encoded(text)
    rows = []
    for rank, (buffer, received) in enumerate(zip(buffers, unknown(buffers))):
        with metered() as work:
            rows.append(decode_shared(codec, SPEC, KEY.private(rank), buffer))
        with metered() as expected_work:
            expected = decode(codec, SPEC, KEY.private(rank), received)
        assert torch.equal(rows[-1], expected)
        assert work == expected_work
    assert all(row_of(row) for row in rows), "they were made at once"


def test_too_many_vectors_are_not_decoded_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, buffers = encoded("topk(0.05)")
    monkeypatch.setattr(decoded_rows, "_MOST_AT_ONCE", len(buffers) * SPEC.numel - 1)
    decoded = decode_shared(codec, SPEC, KEY.private(0), buffers[0])
    assert row_of(decoded) is None
    assert torch.equal(decoded, decode(codec, SPEC, KEY.private(0), unknown(buffers)[0]))


def test_a_deep_copy_has_no_note() -> None:
    buffer = kernels.note(torch.zeros(4, dtype=torch.uint8), row="known")
    buffer_copy = copy.deepcopy(buffer)
    assert kernels.noted(buffer, "row") == "known"
    assert kernels.noted(buffer_copy, "row") is None


def test_known_bytes_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, buffers = encoded("topk(0.05)")

    def refuse(*arguments: object) -> None:
        raise AssertionError("read")

    monkeypatch.setattr("gradwire.core.coded.unpack", refuse)
    mean_of_decoded(codec, SPEC, KEY, buffers, tuple(range(N)))
    decode_shared(codec, SPEC, KEY, buffers[1])
    with pytest.raises(AssertionError, match="read"):
        mean_of_decoded(codec, SPEC, KEY, (*buffers[1:], buffers[0].clone()), tuple(range(N)))


@pytest.mark.parametrize("is_moved", [False, True])
def test_changed_bytes_and_other_tensors_are_refused(is_moved: bool) -> None:
    codec = COMPRESSION.parse("topk(0.05)")
    x = KEY.normal(D)
    ((payload, _, _), _) = EncodedRows().run([(codec, x, None, None, KEY, True)])[0]  # type: ignore[index]
    if is_moved:  # as it would be on an accelerator
        (there,) = moved([payload], torch.device("cpu"))
        decoded_rows.EntryRows(codec, SPEC, [codec.choose(x, KEY)]).note([there])  # type: ignore[attr-defined]
        payload = there
    buffer = payload.buffer
    assert decoded_rows.known_rows(codec, SPEC, [buffer]) is not None
    for other in (Spec((D,), torch.float16), Spec((D + 1,), torch.float32)):
        with pytest.raises(WireError):
            decode_shared(codec, other, KEY, buffer)
    with pytest.raises(WireError):
        decode_shared(COMPRESSION.parse("topk(0.06)"), SPEC, KEY, buffer)
    buffer[-1] ^= 1
    with pytest.raises(WireError, match="checksum"):
        decode_shared(codec, SPEC, KEY, buffer)
    with pytest.raises(WireError, match="checksum"):
        mean_of_decoded(codec, SPEC, KEY, (buffer, buffer), (0, 1))


def test_a_fact_that_is_noted_again_replaces_the_old_one() -> None:
    buffer = kernels.note(torch.zeros(4, dtype=torch.uint8), row=1, host=2)
    kernels.note_more(buffer, row=3)
    assert kernels.noted(buffer, "row") == 3
    assert kernels.noted(buffer, "host") == 2
