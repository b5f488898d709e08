"""Places the optimizer's momentum: on the mean, or on each worker before compression."""

import warnings
from dataclasses import dataclass

from gradwire.compression.feedback.velocity import Velocity
from gradwire.core.codec import Codec, Compression
from gradwire.core.errors import GradwireWarning
from gradwire.core.lifted import lift
from gradwire.core.protocols import Synchronization
from gradwire.core.reducer import Reducer
from gradwire.experiment.run.config import MomentumAt
from gradwire.training.optimizer import Optimizer

_TRIAL = (
    "in a trial (ResNet-20, CIFAR-10, 32 workers, 0.1% kept, 60 epochs) momentum 0.9 after "
    "aggregation reached 68.0%, corrected before compression as in dgc 83.8%, without compression "
    "88.6%"
)


@dataclass(frozen=True)
class Placed:
    """An optimizer and a compression, with the momentum in one of them."""

    optimizer: Optimizer
    compression: Compression
    local_decay: float = 0.0  # weight decay that is added to each worker's gradient
    where: MomentumAt = "after"

    @property
    def is_local(self) -> bool:
        """Whether momentum acts before compression, so that gradients must be clipped before it."""
        return lift(self.compression).momentum_lives == "inside"


def place(
    optimizer: Optimizer,
    compression: Compression,
    synchronization: Synchronization,
    where: MomentumAt,
    mixes: bool = False,
) -> Placed:
    """Moves the momentum to `where`, or under "auto" to where the compression needs it.

    `mixes`: workers average models with neighbours, so steps are taken before anything is sent.
    """
    exchanges = "walks" if mixes else synchronization.exchanges
    lives = lift(compression).momentum_lives
    if where == "before" and not (
        optimizer.heavy_ball is not None
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
        decay = _movable_decay(optimizer, compression)
        return Placed(optimizer.without_momentum(0.0), compression, decay, "before")
    ball = optimizer.heavy_ball
    if ball is None or not ball.momentum:
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
        optimizer.without_momentum(0.0),
        Velocity(compression, ball.momentum, ball.nesterov),
        ball.weight_decay,
        "before",
    )


def _movable_decay(optimizer: Optimizer, compression: Compression) -> float:
    """The weight decay to apply before a compression that has the momentum.

    Refuses an optimizer with another momentum; the same one given twice counts once.
    """
    ball = optimizer.heavy_ball
    if ball is None:
        raise ValueError(
            f"{compression!r} has a momentum of its own, on top of which {optimizer!r} would "
            "average again. Write sgd(lr), with a rate for SGD, or for its own kind of step."
        )
    if ball.momentum and lift(compression).heavy_ball != (ball.momentum, ball.nesterov):
        raise ValueError(
            f"{compression!r} has a momentum of its own, and {optimizer!r} would apply another "
            f"one to what feedback held back: {_TRIAL}. Write "
            f"{optimizer.without_momentum(ball.weight_decay)!r}."
        )
    return ball.weight_decay
