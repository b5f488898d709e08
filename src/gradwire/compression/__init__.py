"""Dimension: what is sent."""

from gradwire.core.codec import Compression
from gradwire.core.registry import Registry

COMPRESSION = Registry("compression", Compression, __name__, varies=True, group=__name__)
