"""Methods that communicate rarely, in a user's own loop: local SGD, DiLoCo, gossip.

Each hooks the steps of a torch optimizer: the optimizer takes steps on this rank's own gradients,
and every `period` steps models are averaged. `context.py` has what all share, `rounds.py` the
averages over all ranks, `local_sgd.py`, `diloco.py` and `decentralized.py` one method each.
"""
