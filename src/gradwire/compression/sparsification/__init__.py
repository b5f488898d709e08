"""Codecs and reducers that send some of the elements.

Each file is one method. `_families.py` has the base classes, `_selection.py` thresholds and codes
of positions. Begin with `topk.py`.
"""
