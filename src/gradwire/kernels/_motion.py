"""Momentum correction: a gradient updates a velocity before elements are selected."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Motion:
    """A residual and a velocity that x updates first: the meaning of `x + motion`.

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
        """Restores the new velocity at positions that were selected but are not sent."""
        if self.masks:
            parts = (self.residual[positions], self.velocity[positions], self.moved[positions])
            self.moved[positions] = self.with_vectors(*parts).step(x[positions])[0]

    def total(self, x: Tensor) -> Tensor:
        """The vector to select from: the residual plus the step along the new velocity."""
        return self.step(x)[1] + self.residual

    def on(self, device: torch.device) -> "Motion":
        """The same with residual and velocity on a device."""
        return self.replaced(self.residual.to(device), self.velocity.to(device))

    def flat(self) -> "Motion":
        """The same with vectors, residual and velocity contiguous."""
        vectors = (self.residual, self.velocity, self.moved)
        flat = self.with_vectors(*(vector.reshape(-1) for vector in vectors))
        return flat.replaced(flat.residual.contiguous(), flat.velocity.contiguous())

    def shards(self, count: int) -> list["Motion"]:
        """The motions of `count` pieces of x."""
        vectors = [v.reshape(-1) for v in (self.residual, self.velocity, self.moved)]
        pieces = zip(*(vector.tensor_split(count) for vector in vectors))
        return [self.with_vectors(*parts) for parts in pieces]

    def replaced(self, residual: Tensor, velocity: Tensor) -> "Motion":
        return replace(self, residual=residual, velocity=velocity)

    def with_vectors(self, residual: Tensor, velocity: Tensor, moved: Tensor) -> "Motion":
        """The same rule for other vectors."""
        return replace(self, residual=residual, velocity=velocity, moved=moved)


Residual = Tensor | Motion


def with_residual(x: Tensor, residual: Residual | None) -> Tensor:
    """x + residual, or the total of a motion."""
    if residual is None:
        return x
    return residual.total(x) if isinstance(residual, Motion) else x + residual


def row_of_residual(residual: Residual | None, row: int) -> Residual | None:
    """One row of a residual of rows, [rows, n]."""
    if isinstance(residual, Motion):
        vectors = (residual.residual, residual.velocity, residual.moved)
        return residual.with_vectors(*(vector[row] for vector in vectors))
    return None if residual is None else residual[row]
