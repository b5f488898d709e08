"""Dimension: when workers synchronize."""

from gradwire.core.protocols import Synchronization
from gradwire.core.registry import Registry

SYNCHRONIZATION: Registry[Synchronization] = Registry(
    "synchronization",
    Synchronization,  # type: ignore[type-abstract]
    __name__,
    varies=True,
    group=__name__,
)
