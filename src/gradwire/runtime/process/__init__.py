"""The engine for real processes: one node in one process, on any transport.

It answers the effects of the simulator, to the same bits, and hangs nowhere: a peer that is gone is
`PeerLost`, silence is `StuckError`. `gloo.py` is the transport of torch.distributed; `zeromq/` is
the one with servers. Begin with `engine.py`, then `rank.py` and `transport.py`.

Native collectives. `allreduce` promises a mean, not an algorithm, so it asks for one by name
(`Collective`); `ring` and the trees name what they do and stay messages. With `native=True` float32
and float64 vectors of everyone go to the all-reduce of gloo or nccl, which adds in another order:
between more than two ranks results differ from the simulator's in the last bits (1e-6). 16-bit
floats are always added in float32 by messages. Native calls must come in the same order on all
ranks: only the main program gets them, and only while it has joined all that it spawned. The ledger
has the messages that they stand for. Payloads are gathered by messages in any case, since they
differ in length, which gloo's all-gather does not take.

Limits. A rank keeps at most 64 MiB of posted sends per peer, and waits beyond. The thread that
receives from a peer pauses while 64 MiB of it are untaken, unless this rank itself waits in a send.
The engine leaves messages in the transport while 64 MiB are unread, unless no program can proceed.

Decoding. The payloads of one gather are decoded when all of them are there. For most codecs that is
less work than could be hidden: four payloads of 4.2 million elements take 1.5 ms with `sign` (1.0
each one by one, and 4.0 to average them) and 3.8 ms with `topk(0.01)`, on one core.
"""
