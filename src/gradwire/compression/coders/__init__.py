"""Lossless coders of symbols: what may follow a quantiser."""
