"""Many experiments from one file, in which any setting may be a list.

`plan.py` reads the file and names its runs, `pool.py` runs them in processes of their own
(`worker.py`), `sweep.py` ties both together, and `results.py` reads what finished runs have left.
It promises that no finished run is computed again, that a sweep which was killed continues where it
was, and that results do not depend on how many runs there were at a time. Begin with `sweep.py`.
"""
