"""What coding and gradients cost in virtual time.

`coding_costs.json` comes with the package, so that the same configuration gives the same virtual
times on every machine; `coding_costs.py` reads it, and its digest is in the record.
`calibration.py` and `function_costs.py` measure such a table (`gradwire codecs --costs FILE`),
`cost_fit.py` fits its numbers. Begin with `coding_costs.py`.

The entry of a codec has its name; examples that are off by more than half have their own entry. A
codec without an entry, such as a plugin's, is charged like the codec at the upper quartile, with a
warning. The table names the entries that differ most from what was measured. It includes neither
the effects of other processes on caches nor arguments of codecs that were not measured, and it is
for CPU kernels: for `device = "cuda"` measure, or give a table of your own.
"""
