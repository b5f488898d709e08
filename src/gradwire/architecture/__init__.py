"""Dimension: which nodes exchange messages."""

from gradwire.core.protocols import Architecture
from gradwire.core.registry import Registry

ARCHITECTURE = Registry("architecture", Architecture, __name__, group=__name__)  # type: ignore[type-abstract]
