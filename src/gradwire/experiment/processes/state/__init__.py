"""What nodes of a run on real processes save, and how they continue from it.

Every file has a checksum; a damaged one is skipped and named, never loaded. `checkpoints.py` is
what all nodes save at the same step, `recovery.py` finds what a durable server had when its job
ended without a checkpoint. Begin with `checkpoints.py`.
"""
