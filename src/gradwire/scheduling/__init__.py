"""Dimension: when each part of a gradient travels."""

from gradwire.core.notation import Registry
from gradwire.core.protocols import Scheduling

SCHEDULING = Registry("scheduling", Scheduling, __name__)  # type: ignore[type-abstract]
