"""What coding and gradients cost in virtual time.

`coding_costs.json` comes with the package, so that the same configuration gives the same virtual
times on every machine; `coding_costs.py` reads it. `calibration.py` and `function_costs.py` measure
such a table, `cost_fit.py` fits its numbers. Begin with `coding_costs.py`.
"""
