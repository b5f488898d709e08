"""Laws of pairs of synchronization and architecture, on quadratics (`quadratics.py`)."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.architecture.allreduce.ring import Ring
from gradwire.architecture.gossip.adpsgd import ADPSGD
from gradwire.architecture.gossip.gossip import Gossip
from gradwire.architecture.graphs.ring import Ring as RingGraph
from gradwire.architecture.parameter_server.parameter_server import ParameterServer
from gradwire.core.protocols import Architecture, Synchronization, ability_of
from gradwire.synchronization.asp import ASP
from gradwire.synchronization.bsp import BSP
from gradwire.synchronization.localsgd import LocalSGD
from gradwire.synchronization.ssp import SSP
from gradwire.testing.laws import Laws, NotApplicable, raises
from gradwire.testing.quadratics import train

SYNCHRONIZATION_LAWS = Laws()
ARCHITECTURE_LAWS = Laws()
# At least one with every ability, and one that each of those needs.
ARCHITECTURES: tuple[Architecture, ...] = (
    AllReduce(),
    Ring(),
    ParameterServer(),
    ParameterServer(2),
    Gossip(RingGraph()),
    Gossip(RingGraph(), ADPSGD()),
)
SYNCHRONIZATIONS: tuple[Synchronization, ...] = (BSP(), ASP(), SSP(2), LocalSGD(3))
SIZES = (1, 2, 3, 4, 5, 8)  # numbers of workers
_MOST_REFUSED = 0.75  # of all sizes; a hypercube exists for 1, 2, 4, 8, 16 only

PairCheck = Callable[..., None]  # of a synchronization and an architecture


def _is_pair(synchronization: Synchronization, architecture: Architecture) -> bool:
    try:
        ability_of(synchronization, architecture)
    except ValueError:
        return False
    return True


def _law_of_pairs(check: PairCheck) -> PairCheck:
    """Adds a law to those of both kinds."""

    @wraps(check)
    def on_pair(synchronization: Synchronization, architecture: Architecture, **given: Any) -> None:
        if not _is_pair(synchronization, architecture):
            raise NotApplicable("there is no such pair")
        check(synchronization, architecture, **given)

    return _of_both(on_pair)


def _of_both(check: PairCheck) -> PairCheck:
    @wraps(check)
    def swapped(architecture: Architecture, synchronization: Synchronization) -> None:
        check(synchronization, architecture)

    SYNCHRONIZATION_LAWS(architecture=ARCHITECTURES)(check)
    ARCHITECTURE_LAWS(synchronization=SYNCHRONIZATIONS)(swapped)
    return check


@_law_of_pairs
def no_pair_hangs(
    synchronization: Synchronization, architecture: Architecture, sizes: Sequence[int] = SIZES
) -> None:
    """For any number of workers it runs to its end, or is refused before the first step."""
    refusals = {}
    for size in sizes:
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
    assert len(refusals) <= _MOST_REFUSED * len(sizes), refusals


@_law_of_pairs
def a_run_can_be_repeated(synchronization: Synchronization, architecture: Architecture) -> None:
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


@_of_both
def other_pairs_are_refused_with_the_reason(
    synchronization: Synchronization, architecture: Architecture
) -> None:
    if _is_pair(synchronization, architecture):
        raise NotApplicable("it is a pair")
    with raises(ValueError, text="needs an architecture with "):
        train(synchronization, architecture)


@ARCHITECTURE_LAWS(size=(1, 2, 3, 5, 8))
def without_compression_every_architecture_gives_the_mean(
    architecture: Architecture, size: int
) -> None:
    if not {"mean", "push_pull"} & set(architecture.offers):
        raise NotApplicable("workers average with neighbours only")
    try:
        architecture.check(size)
    except ValueError as error:
        raise NotApplicable(str(error)) from None
    reference = train("bsp", "allreduce", workers=size, steps=4, momentum=0.5)
    trained = train("bsp", architecture, workers=size, steps=4, momentum=0.5)
    for replica in trained.replicas:
        assert torch.allclose(replica.params, reference.agreed, rtol=0, atol=1e-13)
        assert torch.equal(replica.params, trained.replicas[0].params)


@ARCHITECTURE_LAWS(synchronization=(BSP(), LocalSGD(3)), size=(2, 4, 8))
def gossip_preserves_the_average(
    architecture: Architecture, synchronization: Synchronization, size: int
) -> None:
    """The mean of all models follows gradient descent on the mean.

    All f_i have the same curvature, so the mean gradient is that at the mean.
    """
    if "mix" not in architecture.offers:
        raise NotApplicable("no rounds of averages with neighbours")
    trained = train(
        synchronization, architecture, workers=size, steps=6, lr=0.1, curvatures=[0.7] * size
    )
    mean, centre = trained.initial, trained.minima.mean(dim=0)
    for _ in range(6):
        mean = mean - 0.1 * 0.7 * (mean - centre)
    found = torch.stack(trained.params).mean(dim=0)
    assert torch.allclose(found, mean, rtol=0, atol=1e-9)
