"""Coders of symbols and indices: lossless ones, and polar and trellis codes as source codes.

Promises: a decoder gets back what the encoder was given (source codes: within their distortion) or
raises `WireError`; it never allocates more than the tensor that it expects.
Open first: _stream.py (what the coders of symbols share), then rans.py; indices.py for positions
of kept elements; polar/ for source coding near the rate-distortion bound.
"""
