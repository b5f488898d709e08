"""Codecs near the rate-distortion bound: `dq` (a trellis or a polar plane) and `polar`.

They promise a rate in bits per element, and err least for it. Begin with `dq.py`; `_dq_search.py`
finds the step that keeps to the rate, `_dq_quantised.py` quantises, `_dq_wire.py` writes the code.
"""
