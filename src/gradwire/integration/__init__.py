"""gradwire under somebody else's training loop: DDP, FSDP2, plain loops, rarely talking methods.

What is exchanged and how is the code of simulator and runs (reducers, groups, schedules). Here is
what a loop of PyTorch needs besides: hooks, buckets of its parameters, a thread that exchanges them
(`communicator.py`), and figures of what was sent (`stats.py`). Open `exchange.py` first, then
`ddp.py`.
"""
