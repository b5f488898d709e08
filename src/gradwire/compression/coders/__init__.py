"""Lossless coders of symbols, which may follow a quantiser."""
