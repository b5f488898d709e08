"""Dimension: when workers agree."""

from gradwire.core.notation import Registry
from gradwire.core.protocols import Synchronization

SYNCHRONIZATION = Registry("synchronization", Synchronization, __name__, varies=True)  # type: ignore[type-abstract]
