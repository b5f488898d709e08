"""Where the optimizer's momentum lives: on the mean, or on each worker before compression."""

import warnings
from dataclasses import dataclass, replace

from gradwire.compression.feedback.velocity import Velocity
from gradwire.core.codec import Codec, Compression
from gradwire.core.errors import GradwireWarning
from gradwire.core.lifted import lift
from gradwire.core.protocols import Synchronization
from gradwire.core.reducer import Reducer
from gradwire.experiment.run.config import MomentumAt
from gradwire.training.optimizer import SGD, Optimizer

_TRIAL = (
    "in a trial (ResNet-20, CIFAR-10, 32 workers, 0.1% kept, 60 epochs) momentum 0.9 after "
    "aggregation reached 68.0%, corrected before compression as in dgc 83.8%, without compression "
    "88.6%"
)


@dataclass(frozen=True)
class Placed:
    """An optimizer and a compression with the momentum where it belongs."""

    optimizer: Optimizer
    compression: Compression
    local_decay: float = 0.0  # weight decay that is added to each worker's gradient
    where: MomentumAt = "after"

    @property
    def is_local(self) -> bool:
        """Whether what travels is more than gradients: clipping must come before it then."""
        return lift(self.compression).momentum_lives == "inside"


def place(
    optimizer: Optimizer,
    compression: Compression,
    synchronization: Synchronization,
    where: MomentumAt,
    mixes: bool = False,
) -> Placed:
    """Moves the momentum to where `where` says, or the compression needs it to train.

    `mixes`: workers average models with neighbours, so steps are taken before anything is sent.
    """
    exchanges = "walks" if mixes else synchronization.exchanges
    lives = lift(compression).momentum_lives
    if where == "before" and not (
        isinstance(optimizer, SGD)
        and exchanges == "gradients"
        and not synchronization.sends_changes
    ):
        raise ValueError(
            f'momentum_at="before": only the momentum of sgd can act before compression, on '
            f'gradients; there are {optimizer!r} and {synchronization!r}. Write "auto".'
        )
    if where == "after" and lives == "inside":
        raise ValueError(
            f'momentum_at="after": the momentum is inside {compression!r}. Write "auto", or '
            "another compression."
        )
    if exchanges != "gradients":
        if lives == "inside":
            raise ValueError(
                f"{compression!r} makes a step out of gradients, but what {synchronization!r} "
                "averages are steps already taken. Write ef(...) around the codec, and give the "
                "momentum to the optimizer."
            )
        return Placed(optimizer, compression)  # momentum stays with each worker anyway
    if lives == "inside":
        optimizer = _without_momentum(optimizer, compression)
        decay = optimizer.weight_decay
        return Placed(replace(optimizer, weight_decay=0.0), compression, decay, "before")
    if not isinstance(optimizer, SGD) or not optimizer.momentum:
        return Placed(optimizer, compression)
    if where == "auto":
        where = "before" if lives == "before" else "after"
    if where == "after":
        if lives == "before":
            warnings.warn(
                f"{optimizer!r} after {compression!r}: momentum multiplies what feedback holds "
                f'back; {_TRIAL}. Leave momentum_at at "auto", or set "before".',
                GradwireWarning,
                stacklevel=2,
            )
        return Placed(optimizer, compression)
    assert isinstance(compression, Codec | Reducer)
    return Placed(
        replace(optimizer, momentum=0.0, nesterov=False, weight_decay=0.0),
        Velocity(compression, optimizer.momentum, optimizer.nesterov),
        optimizer.weight_decay,
        "before",
    )


def _without_momentum(optimizer: Optimizer, compression: Compression) -> SGD:
    """The optimizer for a compression that has the momentum; the same one named twice is one."""
    if not isinstance(optimizer, SGD):
        raise ValueError(
            f"{compression!r} has a momentum of its own, on top of which {optimizer!r} would "
            "average again. Write sgd(lr), with a rate for SGD, or for its own kind of step."
        )
    plain = replace(optimizer, momentum=0.0, nesterov=False)
    own = lift(compression).heavy_ball
    if optimizer.momentum and own != (optimizer.momentum, optimizer.nesterov):
        raise ValueError(
            f"{compression!r} has a momentum of its own, and {optimizer!r} would apply another "
            f"one to what feedback held back: {_TRIAL}. Write {plain!r}."
        )
    return plain
