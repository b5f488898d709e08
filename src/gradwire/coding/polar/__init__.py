"""Polar codes as source codes: close to Shannon's bound on rate and distortion.

Korada and Urbanke 2010, "Polar codes are optimal for lossy source coding": successive cancellation,
which decodes a channel code, finds a codeword near any word y; the K free inputs of that codeword
are what travels, and x = u F^(n) is what the receiver decodes.
"""

from gradwire.coding.polar.compressor import PolarCompressor
from gradwire.coding.polar.construction import free_positions

__all__ = ["PolarCompressor", "free_positions"]
