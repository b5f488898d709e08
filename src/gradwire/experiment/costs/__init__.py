"""What coding and gradients cost in virtual time.

`coding_costs.json` comes with the package, so that the same configuration gives the same virtual
times on every machine; `coding_costs.py` reads it, and its digest is in the record.
`calibration.py` and `function_costs.py` measure such a table (`gradwire codecs --costs FILE`),
`cost_fit.py` fits its numbers. Begin with `coding_costs.py`.

A codec stands under its name, and examples that its numbers miss by more than half under their own
text. A codec without an entry, such as a plugin's, is charged like the codec at the upper quartile,
with a warning. The table names the entries that differ most from what was measured. It does not
know what other processes do to caches, nor arguments of codecs that were not measured, and it is of
CPU kernels: for `device = "cuda"` measure, or give a table of your own.
"""
