"""Every header that an algorithm sends is on the list: the simulator with messages made bytes on
the way gives the same run."""

import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from gradwire.architecture.gossip import _posts
from gradwire.architecture.parameter_server import _orders
from gradwire.compression import COMPRESSION
from gradwire.core.codec import Codec
from gradwire.core.coded import MeanOfCoded, MeanOfReceived, MergeOfCoded
from gradwire.core.errors import NonFiniteError, PeerLost, WireError
from gradwire.core.group import Aggregation, Merging
from gradwire.core.key import Key
from gradwire.core.node import Framed, Membership, RunningProgram, Send
from gradwire.core.spec import Spec
from gradwire.experiment.processes.headers import HEADERS
from gradwire.experiment.studies.matrix import pairs
from gradwire.runtime.process.frames import pack, tag_hash, unpack
from gradwire.runtime.virtual.transport import SimulatedTransport
from gradwire.training import wire
from sampling import cover

ANSWERS = ("dense", "compressed")
PAIRS = [(pair.synchronization, pair.architecture) for pair in pairs() if not pair.refusal]
pytestmark = pytest.mark.filterwarnings("ignore::gradwire.core.errors.GradwireWarning")


def through(message: Any) -> Any:
    packed = pack(0, 0, message, HEADERS)
    frame = unpack(packed.block.numpy().tobytes(), HEADERS, is_exact=True)
    payload = packed.payload
    if payload is None:
        payload = packed.block[frame.start : frame.start + frame.nbytes].clone()
    return frame.message(payload)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[type]]:
    """Makes all messages bytes and back; the classes of their headers, and of what is in them."""
    found: set[type] = set()
    send = SimulatedTransport.send

    def travelling(transport: SimulatedTransport, task: RunningProgram[Any], effect: Send) -> None:
        if effect.dst != task.rank:
            data = effect.data
            tag_hash(effect.tag)
            if isinstance(data, Framed) and data.header is not None:
                found.add(type(data.header))
                job = getattr(data.header, "job", None)
                found.update({type(job), type(getattr(job, "merging", None))})
            effect = Send(effect.dst, effect.tag, through(data), effect.nbytes, effect.label)
        send(transport, task, effect)

    monkeypatch.setattr(SimulatedTransport, "send", travelling)
    yield found
    found.discard(type(None))
    assert found <= set(HEADERS.classes)


@pytest.mark.parametrize(
    ("synchronization", "architecture"), cover((pair, *pair) for pair in PAIRS)
)
def test_every_pair(train, request, synchronization, architecture) -> None:
    settings: dict[str, Any] = {
        "workers": 4,
        "steps": 5,
        "layers": (12, 8),
        "compute": "lognormal(0.01)",
        "noise": 0.1,
    }
    direct = train(synchronization, architecture, **settings)
    request.getfixturevalue("seen")
    bytewise = train(synchronization, architecture, **settings)
    assert all(map(torch.equal, bytewise.params, direct.params))
    assert bytewise.time_s == direct.time_s
    assert bytewise.engine.ledger.link_bytes == direct.engine.ledger.link_bytes


@pytest.mark.slow
def test_jobs_of_servers(train, seen) -> None:
    """Every compression on servers that form means."""
    names = [f'parameter_server(2, optimizer="worker", answers="{a}")' for a in ANSWERS]
    texts = ["terngrad(share=True)", *[(cls.examples or ("fp16",))[-1] for cls in COMPRESSION]]
    num_run = 0
    for compression, name in product(texts, names):
        try:
            train("bsp", name, compression, workers=3, steps=2, layers=(9, 4))
            num_run += 1
        except (WireError, NonFiniteError):
            raise
        except ValueError:  # refused
            pass
    train("lag(0.1)", names[0], "topk(0.3)", workers=3, steps=4)
    assert num_run > 90
    jobs = {
        _orders.MeanOfVectors,
        _orders.Maximum,
        _orders.MergeInPairs,
        MeanOfCoded,
        MeanOfReceived,
    }
    assert jobs <= seen
    assert MergeOfCoded in seen
    assert {cls for cls in HEADERS.classes if Aggregation in cls.__mro__} == jobs


@pytest.mark.parametrize("architecture", ["gossip(ring)", "gossip(ring, choco(0.3))"])
def test_workers_that_leave_and_come_back(train, seen, architecture) -> None:
    faults = ["crash(1, at=0.1, rejoin=0.2)"]
    train("bsp", architecture, workers=4, steps=60, faults=faults, heartbeat_s=0.05)
    assert {_posts.JoinNotice, _posts.JoinAnswer, _posts.NewIncarnation, _posts.RoundHeader} <= seen
    seen.clear()
    train("asp", "gossip(ring, adpsgd)", workers=4, steps=60, faults=faults, heartbeat_s=0.05)
    assert {_posts.ModelRequest, _posts.ModelAnswer} <= seen


def test_servers_whose_workers_leave(train, seen) -> None:
    faults = ["crash(1, at=0.1)"]
    with pytest.raises(PeerLost, match=r"rank 1 crashed at 0\.1 s, which was noticed at 0\.6 s"):
        train("bsp", "parameter_server", workers=3, steps=60, faults=faults)
    assert {_orders.Order, _orders.Lost, Membership} <= seen
    faults = ["crash(1, at=0.1, rejoin=0.2)"]
    train("asp", "parameter_server", workers=3, steps=60, faults=faults, heartbeat_s=0.05)
    assert {wire.PushHeader, wire.PullHeader, wire.AnswerHeader} <= seen


@pytest.mark.parametrize("cls", [Aggregation, Merging])
def test_what_servers_may_be_ordered_is_found(cls) -> None:
    names = [one.__name__ for one in HEADERS.classes if cls in one.__mro__]
    expected = {
        Aggregation: ["Maximum", "MeanOfVectors", "MergeInPairs", "MeanOfCoded", "MeanOfReceived"],
        Merging: ["_Sum", "_Tree", "MergeOfCoded"],
    }
    assert names == expected[cls]


EXAMPLES = [(COMPRESSION.parse(text), cls) for cls in COMPRESSION for text in cls.examples]


@pytest.mark.parametrize(
    "codec", cover(case for case in EXAMPLES if isinstance(case[0], Codec)), ids=repr
)
def test_every_codec_can_be_in_a_job(codec) -> None:
    spec = Spec((6, 4), torch.float32, tensors=(("layer", 0, 24, (6, 4)),))
    job = MeanOfCoded(codec, spec, Key(2**64 - 1), (0, 1), Key(3).private(7), True)
    order = _orders.Order("layer", 1, (0, 1), job)
    again = HEADERS.decode(HEADERS.encode(order))
    assert again == order
    assert repr(again) == repr(order)
    assert again.digest == order.digest


def test_errors_travel() -> None:
    for error in (ValueError("x"), KeyError("x"), RuntimeError("\ud800")):
        failed = _orders.Failed.of(error)
        assert HEADERS.decode(HEADERS.encode(failed)) == failed
    lost = _orders.Lost.of(PeerLost(3, None, 1.5))
    assert str(HEADERS.decode(HEADERS.encode(lost)).error()) == "rank 3 is not there yet"


@pytest.mark.slow
def test_the_list_is_the_same_in_every_process() -> None:
    """In whatever order modules are imported."""
    code = (
        "import {}; from gradwire.experiment.processes.headers import HEADERS; "
        "print(HEADERS.digest.hex())"
    )
    command = [sys.executable, "-c", code.format("gradwire.compression.sparsification.gtopk")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == HEADERS.digest.hex()
