"""NaN and infinity from a peer never end up in a model, whatever the compression.

A peer that is not honest writes them into its messages, with a checksum that is right. Codecs that
send values as they are decode them to NaN (`test_which_codecs_decode_them`); the others refuse
them. Where the decoded values meet the model they are found: the run stops, or drops the step.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from gradwire.compression.identity import Identity
from gradwire.core.codec import Codec, Compression, Kind
from gradwire.core.errors import DeadlockError, GradwireWarning, NonFiniteError, WireError
from gradwire.core.node import Framed, Node
from gradwire.core.reducer import Reducer
from gradwire.testing import wire_laws
from gradwire.testing.forging import forge_floats
from gradwire.testing.quadratics import Trained, train
from gradwire.training import client
from gradwire.training.plan import NONFINITE

HOSTILE = 1
VALUES = {"nan": float("nan"), "inf": float("inf")}


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
        data = forge_floats(data, value) if is_spoilt(node, label) else data
        return send(node, dst, tag, data, label)

    def bad_framed(
        node: Node, dst: int, tag: Any, message: Framed, nbytes: int, label: str = ""
    ) -> Any:
        if is_spoilt(node, label) and message.data is not None:
            message = Framed(message.header, forge_floats(message.data, value))
        return send_framed(node, dst, tag, message, nbytes, label)

    with patch.object(Node, "send", bad_send), patch.object(Node, "send_framed", bad_framed):
        yield


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_which_codecs_decode_them(codec, value) -> None:
    wire_laws.nan_and_infinity_are_refused_unless_values_travel_as_they_are(codec, value)


def trained(compression: object, architecture: str, value: str, **settings: Any) -> Trained | None:
    """What a run with a hostile rank leaves; None if it was stopped by what that sent."""
    method = settings.pop("synchronization", "bsp")
    with warnings.catch_warnings(), a_hostile_rank(VALUES[value]):
        warnings.simplefilter("ignore", GradwireWarning)
        try:
            return train(
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
        train(method, architecture, compression, workers=3, steps=12, **settings)
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
    learned_nothing = client.ServerClient._decode_shard

    async def bad(*args: Any) -> Tensor:
        return torch.full_like(await learned_nothing(*args), float("nan"))

    with (
        patch.object(client.ServerClient, "_decode_shard", bad),
        pytest.raises(NonFiniteError, match="server 0 answered a model with NaN or infinity"),
    ):
        train("asp", "parameter_server", workers=2, steps=2)


@pytest.mark.parametrize("method", ["lag(0.1)", "laq(0.1)"])
def test_changes_that_are_not_finite_are_dropped_by_all(method) -> None:
    left = trained(Identity(), "allreduce", "nan", synchronization=method, nonfinite="skip")
    assert left is not None
    assert torch.isfinite(left.params[0]).all()
    assert torch.equal(left.params[0], left.params[2])
    assert left.replicas[0].num_dropped > 0
    text = why(method, "allreduce", "identity", "nan")
    assert "NaN or infinity in the mean of changes in step 0" in text
