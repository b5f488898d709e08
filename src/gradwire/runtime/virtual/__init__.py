"""The simulator: all nodes of a job in one process, with a modelled clock.

It promises the same bits and the same virtual times in every run of the same configuration, and
counts every byte that is sent. Gradients of all nodes are evaluated together. Open `engine.py`
first; `compute_time.py` and `coding_time.py` say how long gradients and coding take.
"""
