"""Laws of all pairs of synchronization and architecture, on quadratics.

A pair is one of `gradwire matrix`: the first example of each, and every algorithm of gossip.
"""

from typing import Any

import pytest
import torch

from gradwire.architecture import ARCHITECTURE
from gradwire.core.node import Framed, RunningProgram, Send
from gradwire.core.notation import notation_name
from gradwire.core.wire import HEADER_NBYTES
from gradwire.experiment.studies.matrix import pairs
from gradwire.runtime.virtual.transport import SimulatedTransport
from gradwire.synchronization import SYNCHRONIZATION

PAIRS = [(pair.synchronization, pair.architecture) for pair in pairs() if not pair.refusal]
REFUSED = [(pair.synchronization, pair.architecture) for pair in pairs() if pair.refusal]
MEANS = [
    repr(architecture)
    for cls in ARCHITECTURE
    for architecture in map(ARCHITECTURE.parse, cls.examples or (notation_name(cls),))
    if {"mean", "push_pull"} & set(architecture.offers)
]
GOSSIP = [text for text in ARCHITECTURE["gossip"].examples if "adpsgd" not in text]
SIZES = range(1, 18)
# Of servers; of neighbours: a round and perhaps a weight, or a life and a version.
HEADERS = ((HEADER_NBYTES,), (8, 16, 24))


@pytest.mark.parametrize(("synchronization", "architecture"), PAIRS)
def test_no_pair_hangs(train, synchronization, architecture) -> None:
    """For any number of workers it runs to its end, or says before the first step why not."""
    refusals = {}
    for size in SIZES:
        try:
            trained = train(
                synchronization,
                architecture,
                workers=size,
                steps=3,
                layers=(12, 8),
                compute="lognormal(0.01)",
            )
        except ValueError as error:
            refusals[size] = str(error)
            continue
        assert all(torch.isfinite(replica.params).all() for replica in trained.replicas)
    assert all(str(size) in text for size, text in refusals.items()), refusals
    assert len(refusals) <= 12  # hypercubes exist for 1, 2, 4, 8, 16


@pytest.mark.parametrize("architecture", MEANS)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_without_compression_every_architecture_gives_the_mean(train, architecture, size) -> None:
    reference = train("bsp", "allreduce", workers=size, steps=4, momentum=0.5)
    trained = train("bsp", architecture, workers=size, steps=4, momentum=0.5)
    for replica in trained.replicas:
        assert torch.allclose(replica.params, reference.agreed, rtol=0, atol=1e-13)
        assert torch.equal(replica.params, trained.replicas[0].params)


@pytest.mark.parametrize("architecture", GOSSIP)
@pytest.mark.parametrize("synchronization", ["bsp", "localsgd(3)"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_gossip_preserves_the_average(train, architecture, synchronization, size) -> None:
    """The mean of all models goes where gradient descent on the mean goes.

    All f_i have the same curvature, so the mean gradient is that at the mean.
    """
    trained = train(
        synchronization, architecture, workers=size, steps=6, lr=0.1, curvatures=[0.7] * size
    )
    mean, centre = trained.initial, trained.minima.mean(dim=0)
    for _ in range(6):
        mean = mean - 0.1 * 0.7 * (mean - centre)
    found = torch.stack(trained.params).mean(dim=0)
    assert torch.allclose(found, mean, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("synchronization", "architecture"), PAIRS)
def test_the_ledger_has_the_sizes_of_the_messages(
    train, monkeypatch, synchronization, architecture
) -> None:
    sizes: list[int] = []
    send = SimulatedTransport.send

    def counted(transport: SimulatedTransport, task: RunningProgram[Any], effect: Send) -> None:
        if effect.dst != task.rank:
            data, header = effect.data, (0,)
            if isinstance(data, Framed):
                data, header = data.data, HEADERS[architecture.startswith("gossip")]
            nbytes = 0 if data is None else data.numel() * data.element_size()
            assert effect.nbytes - nbytes in header
            sizes.append(effect.nbytes)
        send(transport, task, effect)

    monkeypatch.setattr(SimulatedTransport, "send", counted)
    trained = train(synchronization, architecture, workers=4, steps=4, layers=(12, 8))
    ledger = trained.engine.ledger
    assert ledger.total_bytes == sum(sizes) == sum(ledger.tensor_bytes.values())
    assert ledger.total_messages == len(sizes)
    assert sum(sizes) > 0


@pytest.mark.parametrize(("synchronization", "architecture"), PAIRS)
def test_a_run_can_be_repeated(train, synchronization, architecture) -> None:
    first, second = (
        train(
            synchronization,
            architecture,
            workers=4,
            steps=5,
            layers=(12, 8),
            compute="lognormal(0.01)",
            noise=0.1,
        )
        for _ in range(2)
    )
    assert all(map(torch.equal, first.params, second.params))
    assert first.time_s == second.time_s
    assert first.engine.ledger.link_bytes == second.engine.ledger.link_bytes


@pytest.mark.parametrize(("synchronization", "architecture"), REFUSED)
def test_other_pairs_are_refused_with_the_reason(train, synchronization, architecture) -> None:
    with pytest.raises(ValueError, match=r"needs an architecture with .* offers .* Try "):
        train(synchronization, architecture)


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
