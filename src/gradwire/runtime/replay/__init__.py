"""Replay: a run on real processes is computed again from the event order that each rank recorded.

It promises the same parameters to the last bit if one gradient is the same, and an error that names
the entry of the order that does not fit. Open `order.py` first (what is recorded, and the file),
then `engine.py`.
"""
