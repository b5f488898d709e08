"""Tables and figures of runs. Nothing here computes results: rows come in, text and files go out.

Begin with `comparison.py`; `drawing.py` has what all figures share.
"""
