"""Dimension: what travels."""

from gradwire.core.codec import Compression
from gradwire.core.notation import Registry

COMPRESSION = Registry("compression", Compression, __name__, varies=True)
