"""One node of a run on real processes, whatever its role.

Nodes agree before they begin (`admission.py`) and between segments; the node that keeps the record
decides (`conductor.py`). `parts.py` has what differs between workers, servers and others.
`state.py` is what a node keeps, `run.py` what it does: begin there.
"""
