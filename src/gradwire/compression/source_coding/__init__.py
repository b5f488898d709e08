"""Codecs near the rate-distortion bound: `dq` (a trellis or a polar plane) and `polar`.

They keep to a given rate in bits per element, with a small error for it. Begin with `dq.py`;
`_dq_search.py` finds the step that keeps to the rate, `_dq_quantised.py` quantises, `_dq_wire.py`
writes the code.
"""
