"""NaN and infinity from a peer never end up in a model, whatever the compression.

A peer that is not honest writes them into its messages, with a checksum that is right. Codecs that
send values as they are decode them to NaN (`test_which_codecs_decode_them`); the others refuse
them. Where the decoded values meet the model they are found: the run stops, or drops the step.
"""

import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from gradwire.compression.identity import Identity
from gradwire.core.codec import Codec, Compression, Kind, unpack
from gradwire.core.errors import DeadlockError, GradwireWarning, NonFiniteError, WireError
from gradwire.core.key import Key
from gradwire.core.node import Framed, Node
from gradwire.core.payload import DTYPES
from gradwire.core.reducer import Reducer
from gradwire.core.spec import Spec
from gradwire.training import client
from gradwire.training.plan import NONFINITE
from quadratics import Trained, _train

KEY = Key(seed=4).private(0)
HOSTILE = 1
VALUES = {"nan": float("nan"), "inf": float("inf")}


def spoilt(message: Tensor, value: float) -> Tensor:
    """The message with this value in place of every float in it, and the right checksum."""
    if message.is_floating_point():
        return torch.full_like(message, value)
    data = bytes(message.reshape(-1).tolist()) if message.dtype == torch.uint8 else b""
    if len(data) < 8 or data[0] != 0x57 or message.dim() != 1:
        return message
    changed = bytearray(data)
    for dtype, start, stop in floats(data):
        part = torch.full(((stop - start) // dtype.itemsize,), value, dtype=dtype)
        changed[start:stop] = bytes(part.view(torch.uint8).tolist())
    # A checksum is linear, so that of the changed bytes needs no knowledge of where it began.
    crc = int.from_bytes(data[4:8], "little") ^ crc_of(data) ^ crc_of(bytes(changed))
    changed[4:8] = crc.to_bytes(4, "little")
    return torch.tensor(list(changed), dtype=torch.uint8)


def crc_of(data: bytes) -> int:
    return zlib.crc32(data[8:], zlib.crc32(data[:4]))


def floats(data: bytes) -> list[tuple[torch.dtype, int, int]]:
    """Where the floating-point parts of a payload lie; see core/payload.py."""
    at, parts = 8, []
    for _ in range(data[2]):
        dtype, numel, shift = DTYPES[data[at]], 0, 0
        at += 1
        while True:
            numel |= (data[at] & 0x7F) << shift
            shift, at = shift + 7, at + 1
            if data[at - 1] < 0x80:
                break
        parts.append((dtype, numel))
    widest = max((dtype.itemsize for dtype, numel in parts), default=1)
    start, found = -(-at // widest) * widest, []
    for dtype, numel in sorted(parts, key=lambda part: -part[0].itemsize):
        if dtype.is_floating_point:
            found.append((dtype, start, start + numel * dtype.itemsize))
        start += numel * dtype.itemsize
    return found


@contextmanager
def a_hostile_rank(value: float) -> Iterator[None]:
    """Whatever rank 1 sends has this value in it.

    Not what all agree on whether to drop a step: it would do something else than it says, and wait
    for others that do not wait for it.
    """
    send, send_framed = Node.send, Node.send_framed

    def is_spoilt(node: Node, label: str) -> bool:
        return node.rank == HOSTILE and label != NONFINITE

    def bad_send(node: Node, dst: int, tag: Any, data: Tensor, label: str = "") -> Any:
        data = spoilt(data, value) if is_spoilt(node, label) else data
        return send(node, dst, tag, data, label)

    def bad_framed(
        node: Node, dst: int, tag: Any, message: Framed, nbytes: int, label: str = ""
    ) -> Any:
        if is_spoilt(node, label) and message.data is not None:
            message = Framed(message.header, spoilt(message.data, value))
        return send_framed(node, dst, tag, message, nbytes, label)

    with patch.object(Node, "send", bad_send), patch.object(Node, "send_framed", bad_framed):
        yield


# Codecs that send values as they are: what they decode is checked where it meets the model. A codec
# that can refuse NaN at no cost should, and is not on this list.
HANDS_ON = {
    "adaptive_density",
    "aji",
    "allocated",
    "bf16",
    "dctk",
    "fp16",
    "gaussiank",
    "identity",
    "layerwise",
    "randomk",
    "sampledk",
    "sidco",
    "topk",
    "variance",
}


@pytest.mark.parametrize("value", VALUES)
def test_which_codecs_decode_them(codec, value) -> None:
    if codec.traits.takes is not Kind.REAL:
        pytest.skip("it never sees values")
    x = Key(1).normal(40)
    spec = Spec.of(x)
    honest = codec.encode(x, codec.init(spec), KEY)[0].buffer
    forged = spoilt(honest, VALUES[value])
    try:
        decoded = codec.decode(unpack(codec, forged, spec), spec, KEY)
    except WireError:
        assert not torch.equal(forged, honest)
        return
    if not torch.isfinite(decoded).all():
        name = repr(codec).partition("(")[0].partition(" ")[0]
        assert name in HANDS_ON, f"{codec!r} decodes {value}; refuse it, or put it on the list"


def trained(compression: object, architecture: str, value: str, **settings: Any) -> Trained | None:
    """What a run with a hostile rank leaves; None if it was stopped by what that sent."""
    method = settings.pop("synchronization", "bsp")
    with warnings.catch_warnings(), a_hostile_rank(VALUES[value]):
        warnings.simplefilter("ignore", GradwireWarning)
        try:
            return _train(
                method,
                architecture,
                repr(compression),
                workers=3,
                steps=2,
                layers=(24, 9),
                **settings,
            )
        except (NonFiniteError, WireError):
            return None
        except ValueError as error:
            if "must be there from the beginning" in str(error):
                return None  # the step was dropped in which onebit_adam learns its variance
            raise
        except DeadlockError:  # the others dropped a step, the hostile one goes on alone
            assert settings.get("nonfinite") == "skip"
            return None


def is_usable(compression: Compression) -> bool:
    if isinstance(compression, Reducer):
        try:
            compression.check_names(["layer 0", "layer 1"])
        except ValueError:
            return False
        return True
    assert isinstance(compression, Codec)
    return compression.traits.takes is Kind.REAL and not compression.traits.needs_feedback


@pytest.mark.parametrize(
    ("architecture", "nonfinite"),
    [
        ('allreduce("gather")', "error"),
        ('allreduce("gather")', "skip"),
        ('allreduce("scatter")', "skip"),
        ("parameter_server(2)", "skip"),
    ],
)
def test_means_are_checked(compression, architecture, nonfinite) -> None:
    """No replica has them, and those that drop a step drop it together."""
    if not is_usable(compression):
        pytest.skip("it does not stand alone, or asks for other tensors")
    for value in VALUES:
        left = trained(compression, architecture, value, nonfinite=nonfinite)
        if left is not None:
            first, _, third = left.params  # what the hostile one has is its own affair
            assert torch.isfinite(first).all(), value
            assert torch.equal(first, third)  # all decided alike


def why(method: str, architecture: str, compression: str, value: str, **settings: Any) -> str:
    """Why a run with a hostile rank stops."""
    with a_hostile_rank(VALUES[value]), pytest.raises((NonFiniteError, WireError)) as caught:
        _train(method, architecture, compression, workers=3, steps=12, **settings)
    return str(caught.value)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("text", ["identity", "topk(0.5)", "fp16"])
def test_the_mean_is_refused_in_the_step_in_which_it_comes(text, value) -> None:
    text = why("bsp", "allreduce", text, value)
    assert "NaN or infinity in the mean in step 0 on rank" in text
    assert "another rank sent it" in text


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(
    "method", ["dpsgd", "diffusion", "d2", "gradient_tracking", "sgp", "choco(0.3)", "adpsgd"]
)
def test_neighbours_are_named(method, value) -> None:
    synchronization = "asp" if method == "adpsgd" else "bsp"
    compression = "topk(0.5)" if method == "choco(0.3)" else "identity"
    text = why(synchronization, f"gossip(ring, {method})", compression, value)
    assert f"rank {HOSTILE} sent" in text


@pytest.mark.parametrize("value", VALUES)
def test_a_model_that_is_fetched_is_checked(value) -> None:
    text = why("fedavg(0.4)", "allreduce", "identity", value)  # one client in each round
    assert f"rank {HOSTILE} sent NaN or infinity in 'model'" in text


def test_a_server_that_answers_nan_is_named() -> None:
    learned_nothing = client.ServerClient._piece

    async def bad(*args: Any) -> Tensor:
        return torch.full_like(await learned_nothing(*args), float("nan"))

    with (
        patch.object(client.ServerClient, "_piece", bad),
        pytest.raises(NonFiniteError, match="server 0 answered a model with NaN or infinity"),
    ):
        _train("asp", "parameter_server", workers=2, steps=2)


@pytest.mark.parametrize("method", ["lag(0.1)", "laq(0.1)"])
def test_changes_that_are_not_finite_are_dropped_by_all(method) -> None:
    left = trained(Identity(), "allreduce", "nan", synchronization=method, nonfinite="skip")
    assert left is not None
    assert torch.isfinite(left.params[0]).all()
    assert torch.equal(left.params[0], left.params[2])
    assert left.replicas[0].num_dropped > 0
    text = why(method, "allreduce", "identity", "nan")
    assert "NaN or infinity in the mean of changes in step 0" in text
