"""Codecs that round every element: to levels, powers of two, signs or narrower floats.

Each file is one codec. `_packed.py` has the base class of most; `_buckets.py`, `_scales.py`,
`_powers.py` and `_rotation.py` hold what they share. Begin with `natural.py` or `sign.py`.
"""
