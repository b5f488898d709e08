"""Dimension: who talks to whom."""

from gradwire.core.notation import Registry
from gradwire.core.protocols import Architecture

ARCHITECTURE = Registry("architecture", Architecture, __name__)  # type: ignore[type-abstract]
