"""Optimizers as pure functions on flat vectors: stochastic gradient descent with Polyak's (1964)
or Nesterov's (1983) momentum, and Adam (Kingma and Ba 2015).

Parameters and state are values: `update` returns new tensors and never writes into its
arguments, because virtual workers share them. The numbers are those of `torch.optim`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from gradwire.core.batched import Elementwise, batched
from gradwire.core.notation import Expression

State = dict[str, Tensor]
Memory = tuple[Tensor, Mapping[str, Tensor]]  # for the new parameters, and for vectors of the state
_NO_MEMORY: tuple[None, Mapping[str, Tensor]] = (None, {})


class HeavyBall(NamedTuple):
    """The part of an optimizer that can act on each worker, before compression."""

    momentum: float
    nesterov: bool
    weight_decay: float


class Optimizer(Expression, ABC):
    """A rule that turns a gradient into new parameters."""

    lr: float  # the base rate; a schedule multiplies it
    # Whether each element is updated by itself, so that parts of a model can be updated early.
    is_elementwise: ClassVar[bool] = False

    @property
    def heavy_ball(self) -> HeavyBall | None:
        """Its momentum, if the rest of the rule is linear in the gradient, so that it can move."""
        return None

    def without_momentum(self, weight_decay: float) -> "Optimizer":
        """The same rule without momentum, with this weight decay; for rules with a `heavy_ball`."""
        raise NotImplementedError(f"{self!r} cannot be separated from its momentum")

    @abstractmethod
    def init(self, params: Tensor) -> State:
        """The state before the first step."""

    @abstractmethod
    def update(
        self,
        params: Tensor,
        gradient: Tensor,
        state: Mapping[str, Tensor],
        lr: float,
        out: "Memory | None" = None,
    ) -> tuple[Tensor, State]:
        """New parameters and state after one step with learning rate `lr`.

        Vectors are written into `out`, if given, which must not be the memory of an argument.
        """


@dataclass(frozen=True, repr=False)
class SGD(Optimizer):
    """Stochastic gradient descent, with momentum and L2 weight decay if asked for.

    v <- momentum * v + g;  x <- x - lr * v, or with Nesterov x <- x - lr * (g + momentum * v).
    """

    paper: ClassVar[str] = (
        "Sutskever et al. 2013, On the importance of initialization and momentum in deep learning"
    )
    examples = ("sgd(0.1)", "sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.0005)")
    is_elementwise = True
    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check_at_least_zero("sgd", lr=self.lr, weight_decay=self.weight_decay)
        _check_fraction("sgd", momentum=self.momentum)
        if self.nesterov and not self.momentum:
            raise ValueError(
                "sgd: nesterov needs a momentum, e.g. sgd(0.1, momentum=0.9, nesterov=True)"
            )

    @property
    def heavy_ball(self) -> HeavyBall:
        return HeavyBall(self.momentum, self.nesterov, self.weight_decay)

    def without_momentum(self, weight_decay: float) -> "SGD":
        return replace(self, momentum=0.0, nesterov=False, weight_decay=weight_decay)

    def init(self, params: Tensor) -> State:
        return {"momentum": torch.zeros_like(params)} if self.momentum else {}

    def update(
        self,
        params: Tensor,
        gradient: Tensor,
        state: Mapping[str, Tensor],
        lr: float,
        out: Memory | None = None,
    ) -> tuple[Tensor, State]:
        place, kept = out or _NO_MEMORY
        if self.weight_decay:
            gradient = gradient.add(params, alpha=self.weight_decay)
        if not self.momentum and "momentum" not in state:  # a ramp may begin at zero
            return torch.sub(params, gradient, alpha=lr, out=place), {}
        # Rounded as torch.optim does it: the product, then the sum.
        velocity = torch.mul(state["momentum"], self.momentum, out=kept.get("momentum"))
        # Workers with gradients of their own may share the state: then memory of one is too small.
        is_shared = velocity.dim() < gradient.dim()
        velocity = velocity + gradient if is_shared else velocity.add_(gradient)
        direction = gradient.add(velocity, alpha=self.momentum) if self.nesterov else velocity
        return torch.sub(params, direction, alpha=lr, out=place), {"momentum": velocity}


@dataclass(frozen=True, repr=False)
class Adam(Optimizer):
    """Adam: steps scaled by running moments of the gradient; weight decay is L2, as in Adam."""

    paper: ClassVar[str] = "Kingma and Ba 2015, Adam: a method for stochastic optimization"
    is_elementwise = True
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check_at_least_zero("adam", lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)
        _check_fraction("adam", beta1=self.beta1, beta2=self.beta2)

    def init(self, params: Tensor) -> State:
        zeros = torch.zeros_like(params)
        # The count stays on the CPU: reading it must not wait for the device.
        return {"mean": zeros, "square": zeros.clone(), "step": torch.zeros((), dtype=torch.int64)}

    def update(
        self,
        params: Tensor,
        gradient: Tensor,
        state: Mapping[str, Tensor],
        lr: float,
        out: Memory | None = None,
    ) -> tuple[Tensor, State]:
        place, kept = out or _NO_MEMORY
        if self.weight_decay:
            gradient = gradient.add(params, alpha=self.weight_decay)
        step = state["step"] + 1
        mean = torch.lerp(state["mean"], gradient, 1.0 - self.beta1, out=kept.get("mean"))
        square = torch.mul(state["square"], self.beta2, out=kept.get("square"))
        is_shared = square.dim() < gradient.dim()  # by workers, as for SGD
        add = torch.addcmul if is_shared else Tensor.addcmul_
        square = add(square, gradient, gradient, value=1.0 - self.beta2)
        # m_hat / (sqrt(v_hat) + eps)   (Kingma and Ba 2015, Alg. 1)
        count = int(step)
        correction1, correction2 = 1.0 - self.beta1**count, 1.0 - self.beta2**count
        scale = (square.sqrt() / correction2**0.5).add_(self.eps)
        params = torch.addcdiv(params, mean, scale, value=-lr / correction1, out=place)
        return params, {"mean": mean, "square": square, "step": step}


def clip_by_norm(gradient: Tensor, max_norm: float) -> Tensor:
    """The gradient, scaled down to Euclidean norm `max_norm` if it is longer.

    Pascanu, Mikolov and Bengio 2013, "On the difficulty of training recurrent neural networks",
    Alg. 1.
    """
    if not max_norm > 0.0:
        raise ValueError(f"clip_by_norm needs max_norm > 0, got {max_norm}")
    norm = torch.linalg.vector_norm(gradient)
    return gradient * (max_norm / norm).clamp(max=1.0)


def _is_by_element(args: tuple[Any, ...]) -> bool:
    optimizer, clip_norm, *_, out = args
    return clip_norm is None and out is None and optimizer.is_elementwise


def clipped_update(
    optimizer: Optimizer,
    clip_norm: float | None,
    lr: float,
    params: Tensor,
    gradient: Tensor,
    state: Mapping[str, Tensor],
    out: Memory | None = None,
) -> tuple[Tensor, State]:
    """One step with a gradient that is clipped first, if at all."""
    if clip_norm is not None:
        gradient = clip_by_norm(gradient, clip_norm)
    return optimizer.update(params, gradient, state, lr, out)


batched(Elementwise(clipped_update, _is_by_element))(clipped_update)


def _check_at_least_zero(name: str, **values: float) -> None:
    for key, value in values.items():
        if not value >= 0.0:
            raise ValueError(f"{name} needs {key} >= 0, got {value}")


def _check_fraction(name: str, **values: float) -> None:
    for key, value in values.items():
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{name} needs 0 <= {key} < 1, got {value}")
