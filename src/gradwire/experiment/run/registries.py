"""Everything that can be chosen by name, and `gradwire.register`, which adds to it.

The group of a registry is the name under which packages declare entry points for it.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from gradwire import data
from gradwire.architecture import ARCHITECTURE
from gradwire.architecture.gossip import GOSSIP
from gradwire.architecture.graphs import GRAPHS
from gradwire.compression import COMPRESSION
from gradwire.core.notation import Expression
from gradwire.core.registry import Registry
from gradwire.data import DataPartition
from gradwire.models import Model
from gradwire.runtime.network.faults import FAULTS
from gradwire.runtime.network.topology import TOPOLOGY
from gradwire.runtime.virtual.compute_time import COMPUTE_TIME, STRAGGLERS
from gradwire.runtime.virtual.host import HOST
from gradwire.scheduling import SCHEDULING
from gradwire.synchronization import SYNCHRONIZATION
from gradwire.training.layer_times import LAYER_TIMES
from gradwire.training.optimizer import Optimizer
from gradwire.training.schedule import Schedule

T = TypeVar("T", bound=Callable[..., Any])

DIMENSIONS: dict[str, Registry[Any]] = {
    "compression": COMPRESSION,
    "synchronization": SYNCHRONIZATION,
    "architecture": ARCHITECTURE,
    "scheduling": SCHEDULING,
}
MODELS: Registry[Model] = Registry(
    "model",
    Model,  # type: ignore[type-abstract]
    "gradwire.models",
    group="gradwire.models",
)
OPTIMIZERS: Registry[Optimizer] = Registry(
    "optimizer",
    Optimizer,  # type: ignore[type-abstract]
    "gradwire.training.optimizer",
    varies=True,
    group="gradwire.optimizers",
)
SCHEDULES: Registry[Schedule] = Registry(
    "schedule",
    Schedule,  # type: ignore[type-abstract]
    "gradwire.training.schedule",
    group="gradwire.schedules",
)
PARTITIONS: Registry[DataPartition] = Registry(
    "partition",
    DataPartition,  # type: ignore[type-abstract]
    "gradwire.data.partition",
    group="gradwire.partitions",
)
REGISTRIES: dict[str, Registry[Any]] = {
    **DIMENSIONS,
    "graph": GRAPHS,
    "gossip algorithm": GOSSIP,
    "model": MODELS,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "partition": PARTITIONS,
    "compute": COMPUTE_TIME,
    "layer times": LAYER_TIMES,
    "stragglers": STRAGGLERS,
    "topology": TOPOLOGY,
    "host": HOST,
    "fault": FAULTS,
}


def register(chosen: T) -> T:
    """Adds a class, or a function that returns a data set, in this process; usable as a decorator.

    From then on its name is known to the parser and to `gradwire.simulate`. Processes that this
    one starts do not know it: for those, declare an entry point in an installed package.

    Raises ValueError for a name that exists already, with the origins of both, and for what is
    no finished expression. The same class defined again replaces the earlier one.
    """
    if not isinstance(chosen, type):
        data.register(chosen)
        return chosen
    registry = registry_of(chosen)
    if registry is None:
        kinds = ", ".join(each.kind.__name__ for each in REGISTRIES.values())
        raise ValueError(
            f"{chosen.__module__}.{chosen.__qualname__} can be registered as nothing: derive it "
            f"from one of {kinds}, or register a function that returns a Dataset"
        )
    registry.register(chosen)
    return chosen


def registry_of(cls: type) -> Registry[Any] | None:
    """The registry in which a class belongs."""
    if not issubclass(cls, Expression):
        return None
    return next((each for each in REGISTRIES.values() if issubclass(cls, each.kind)), None)
