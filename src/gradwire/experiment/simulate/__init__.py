"""Runs on the simulator: all nodes in one process, in deterministic virtual time.

The same configuration gives the same bits, virtual times included, and a resumed run ends in the
bits of one that was not interrupted. Begin with `simulation.py`.
"""
