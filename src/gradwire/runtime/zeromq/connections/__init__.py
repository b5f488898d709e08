"""The sockets of a node: keys and limits, connections that break and return, bytes in and out.

Promises: nothing blocks; without the keys of the job a stranger gets no further than the handshake;
the number of connections of strangers, and the memory that they cost, is bounded.
Open first: wire.py (what the rest uses), then sockets.py (how sockets are made).
"""
