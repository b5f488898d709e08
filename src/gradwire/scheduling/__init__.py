"""Dimension: when each part of a gradient is sent."""

from gradwire.core.protocols import Scheduling
from gradwire.core.registry import Registry

SCHEDULING = Registry("scheduling", Scheduling, __name__, group=__name__)  # type: ignore[type-abstract]
