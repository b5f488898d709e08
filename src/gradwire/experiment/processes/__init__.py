"""Runs on real processes: ranks of torch.distributed, or scheduler, servers and workers on ZeroMQ.

`launch/` starts the processes on this machine, `node/` is what each of them does, `state/` is what
they save and recover. They end in the bits of the simulator where methods are synchronous, and a
recorded asynchronous run can be replayed to the same bits (`replay.py`). Begin with `ranks.py`
(torchrun) or `served.py` (servers), then `node/run.py`.
"""
