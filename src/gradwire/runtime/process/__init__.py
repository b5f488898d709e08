"""The engine for real processes: one process per rank, over gloo, nccl or ZeroMQ.

It promises the results of the simulator to the last bit (without native collectives), limits on the
memory for messages, and an error in place of a hang: a lost rank is `PeerLost`, silence is
`StuckError`. Open `engine.py` first, then `rank.py`; `transport.py` says what a transport must do.
"""
