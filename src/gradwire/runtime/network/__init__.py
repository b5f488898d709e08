"""The simulator's network: bandwidths, latencies, queues of NICs, lost messages and crashes.

It promises that messages between two nodes arrive in order, and that a NIC sends and receives no
more than its bandwidth. It knows nothing of programs. Open `network.py` first; `faults.py` has the
faults that a user can write.
"""
