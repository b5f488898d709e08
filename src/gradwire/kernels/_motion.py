"""A gradient that moves a velocity on its way into what is selected from (momentum correction)."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Motion:
    """A residual, and a velocity that x moves first: what `x + motion` stands for.

        u <- momentum * velocity + scale * x;   total = residual + u,

    or with Nesterov's step scale * x + momentum * u in place of u. It may be given where selections
    take a residual. They write u into `moved`, with zeros at what they selected if it `masks`.
    """

    residual: Tensor
    velocity: Tensor
    moved: Tensor  # contiguous, of the velocity's dtype, and none of the other vectors
    momentum: float
    scale: float = 1.0
    nesterov: bool = False
    masks: bool = False

    def step(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The new velocity, and what is added to the residual, both in the velocity's dtype."""
        gradient = x.to(self.velocity.dtype) * self.scale
        velocity = self.velocity * self.momentum + gradient
        if not self.nesterov:
            return velocity, velocity
        return velocity, gradient + velocity * self.momentum

    def unmask(self, x: Tensor, positions: Tensor) -> None:
        """Puts the new velocity back at what was selected and is not sent after all."""
        if self.masks:
            parts = (self.residual[positions], self.velocity[positions], self.moved[positions])
            self.moved[positions] = self._with(*parts).step(x[positions])[0]

    def __radd__(self, x: Tensor) -> Tensor:
        return self.step(x)[1] + self.residual

    # As tensors have them, because reducers cut a residual into shards before codecs see it.

    def detach(self) -> "Motion":
        return self

    def to(self, device: torch.device) -> "Motion":
        return self.replaced(self.residual.to(device), self.velocity.to(device))

    def contiguous(self) -> "Motion":
        return self.replaced(self.residual.contiguous(), self.velocity.contiguous())

    def reshape(self, *shape: int) -> "Motion":
        vectors = (self.residual, self.velocity, self.moved)
        return self._with(*(vector.reshape(*shape) for vector in vectors))

    def tensor_split(self, count: int) -> list["Motion"]:
        vectors = (self.residual, self.velocity, self.moved)
        return [self._with(*parts) for parts in zip(*(v.tensor_split(count) for v in vectors))]

    def replaced(self, residual: Tensor, velocity: Tensor) -> "Motion":
        return replace(self, residual=residual, velocity=velocity)

    def _with(self, residual: Tensor, velocity: Tensor, moved: Tensor) -> "Motion":
        return replace(self, residual=residual, velocity=velocity, moved=moved)


Residual = Tensor | Motion
