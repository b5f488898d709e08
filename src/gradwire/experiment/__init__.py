"""Experiments: from a configuration to a record, on the simulator or on real processes.

`run/` says what a run is. `simulate/` and `processes/` run it, to the same bits. `studies/` measure
and compare many runs or codecs, `costs/` holds and measures what coding costs in virtual time,
`report/` makes tables and figures. Begin with `run/config.py`, then `simulate/simulation.py`.
"""
