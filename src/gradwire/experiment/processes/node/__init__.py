"""One node of a run on real processes, whatever its role.

Nodes agree before they begin (`admission.py`) and between segments; the node that keeps the record
decides (`coordinator.py`). What differs between workers, servers and others is in `run/roles.py`.
`state.py` is what a node keeps, `run.py` what it does: begin there.
"""
