"""Measurements over many runs or codecs: one file for each `gradwire` command that compares.

`codecs.py` and `rd.py` measure codecs, `compare.py`, `matrix.py` and `demo.py` train with several
methods, `probe.py` and `prediction.py` ask whether the simulator predicts a real network. Results
are rows of plain values; `report/` shows them. Begin with `compare.py`.
"""
