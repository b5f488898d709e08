"""How many steps epochs take: one rule for runs, for samplers and for clients that train alone.

An epoch has as many steps as there are whole mini-batches in the examples, and at least one. What
does not fill a last mini-batch is left to later epochs. So a run of E epochs is as long as a round
of `fedavg(1.0, epochs=E)`.
"""


def steps_per_epoch(num_examples: float, batch_size: int) -> int:
    """Whole mini-batches in the examples, which may be those of an average worker."""
    return max(1, int(num_examples // batch_size))


def steps_of_epochs(epochs: float, steps_per_epoch: float) -> int:
    """The steps of some epochs, or of a part of one, rounded to the nearest number from 1 on."""
    return max(1, round(epochs * steps_per_epoch))
