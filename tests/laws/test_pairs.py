"""Laws of all pairs of synchronization and architecture, on quadratics.

A pair is one of `gradwire matrix`: the first example of each, and every algorithm of gossip.
"""

from typing import Any

import pytest

from gradwire.architecture import ARCHITECTURE
from gradwire.core.node import Exchange, Framed, Pass, RunningProgram, Send
from gradwire.core.notation import notation_name
from gradwire.core.protocols import Architecture, Synchronization
from gradwire.core.wire import HEADER_NBYTES
from gradwire.experiment.studies.matrix import pairs
from gradwire.runtime.virtual.exchanges import Exchanges
from gradwire.runtime.virtual.passes import Passes
from gradwire.runtime.virtual.transport import SimulatedTransport
from gradwire.synchronization import SYNCHRONIZATION
from gradwire.synchronization.bsp import BSP
from gradwire.synchronization.localsgd import LocalSGD
from gradwire.testing import pair_laws
from sampling import SIZES, cover


def _architectures() -> list[str]:
    """As every one is written."""
    return [text for cls in ARCHITECTURE for text in cls.examples or (notation_name(cls),)]


PAIRS = [(pair.synchronization, pair.architecture) for pair in pairs() if not pair.refusal]
# In the quick run every synchronization and every architecture, not each with each.
COVERED = cover((pair, *pair) for pair in PAIRS)
REFUSED = [(pair.synchronization, pair.architecture) for pair in pairs() if pair.refusal]
MEANS = [
    architecture
    for architecture in map(ARCHITECTURE.parse, _architectures())
    if {"mean", "push_pull"} & set(architecture.offers)
]
MIXES = [each for each in map(ARCHITECTURE.parse, _architectures()) if "mix" in each.offers]
# Of servers; of neighbours: a round and perhaps a weight, or a life and a version.
HEADERS = ((HEADER_NBYTES,), (8, 16, 24))


def parsed(synchronization: str, architecture: str) -> tuple[Synchronization, Architecture]:
    return SYNCHRONIZATION.parse(synchronization), ARCHITECTURE.parse(architecture)


@pytest.mark.parametrize(("synchronization", "architecture"), COVERED)
def test_no_pair_hangs(synchronization, architecture) -> None:
    pair_laws.no_pair_hangs(*parsed(synchronization, architecture), sizes=SIZES)


@pytest.mark.parametrize("architecture", MEANS, ids=repr)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_without_compression_every_architecture_gives_the_mean(architecture, size) -> None:
    pair_laws.without_compression_every_architecture_gives_the_mean(architecture, size)


@pytest.mark.parametrize("architecture", MIXES, ids=repr)
@pytest.mark.parametrize("synchronization", [BSP(), LocalSGD(3)], ids=repr)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_gossip_preserves_the_average(architecture, synchronization, size) -> None:
    pair_laws.gossip_preserves_the_average(architecture, synchronization, size)


@pytest.mark.parametrize(("synchronization", "architecture"), PAIRS)
def test_the_ledger_has_the_sizes_of_the_messages(
    train, monkeypatch, synchronization, architecture
) -> None:
    sizes: list[int] = []
    send, post, start = SimulatedTransport.send, Exchanges.post, Passes.post

    def counted(transport: SimulatedTransport, task: RunningProgram[Any], effect: Send) -> None:
        if effect.dst != task.rank:
            data, header = effect.data, (0,)
            if isinstance(data, Framed):
                data, header = data.data, HEADERS[architecture.startswith("gossip")]
            nbytes = 0 if data is None else data.numel() * data.element_size()
            assert effect.nbytes - nbytes in header
            sizes.append(effect.nbytes)
        send(transport, task, effect)

    def counted_all(exchanges: Exchanges, task: RunningProgram[Any], effect: Exchange) -> Any:
        messages = effect.outgoing.messages(len(effect.members))
        sizes.extend(x.nbytes for rank, x in enumerate(messages) if rank != effect.rank)
        return post(exchanges, task, effect)

    def counted_passes(passes: Passes, task: RunningProgram[Any], effect: Pass[Any]) -> Any:
        sizes.extend([effect.outgoing.message.nbytes] * (len(effect.members) - 1))
        return start(passes, task, effect)

    monkeypatch.setattr(SimulatedTransport, "send", counted)
    monkeypatch.setattr(Exchanges, "post", counted_all)
    monkeypatch.setattr(Passes, "post", counted_passes)
    trained = train(synchronization, architecture, workers=4, steps=4, layers=(12, 8))
    ledger = trained.engine.ledger
    assert ledger.total_bytes == sum(sizes) == sum(ledger.tensor_bytes.values())
    assert ledger.total_messages == len(sizes)
    assert sum(sizes) > 0


@pytest.mark.parametrize(("synchronization", "architecture"), COVERED)
def test_a_run_can_be_repeated(synchronization, architecture) -> None:
    pair_laws.a_run_can_be_repeated(*parsed(synchronization, architecture))


@pytest.mark.parametrize(("synchronization", "architecture"), REFUSED)
def test_other_pairs_are_refused_with_the_reason(synchronization, architecture) -> None:
    pair_laws.other_pairs_are_refused_with_the_reason(*parsed(synchronization, architecture))


def test_the_pairs_are_those_of_the_surveys_table() -> None:
    """Tang et al. 2020, Table 5: three pairs have a dash, nine are graded."""

    def runs(synchronization: str, architecture: str) -> bool:
        needs = SYNCHRONIZATION.parse(synchronization).needs
        return bool(set(needs) & set(ARCHITECTURE.parse(architecture).offers))

    for architecture in ("parameter_server", "allreduce", "gossip(ring)"):
        assert runs("bsp", architecture)
        assert runs("localsgd(4)", architecture)
        assert runs("ssp(2)", architecture) == (architecture == "parameter_server")
    assert runs("asp", "parameter_server")
    assert runs("asp", "gossip(ring, adpsgd)")
    assert not runs("asp", "allreduce")
