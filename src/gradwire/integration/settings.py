"""What the user chooses: the same on all ranks."""

from dataclasses import dataclass
from typing import Any

from gradwire.architecture import ARCHITECTURE
from gradwire.compression import COMPRESSION
from gradwire.core.codec import Compression
from gradwire.core.protocols import Architecture, Synchronization, ability_of
from gradwire.integration.own_compressor import OwnCompressor, is_compressor
from gradwire.synchronization import SYNCHRONIZATION
from gradwire.synchronization.asp import ASP
from gradwire.synchronization.bsp import BSP
from gradwire.synchronization.ssp import SSP

STATE_KEY = "gradwire"  # of what compression keeps, in the state_dict of an optimizer


@dataclass(frozen=True)
class Settings:
    """How gradients are exchanged."""

    compression: Compression
    architecture: Architecture
    seed: int = 0
    steps_per_epoch: float | None = None  # for numbers that change with epochs
    synchronization: Synchronization = BSP()  # noqa: RUF009, it is frozen

    @property
    def num_servers(self) -> int:
        return self.architecture.num_servers

    @staticmethod
    def parse(
        compression: Any,
        architecture: str = "allreduce",
        seed: int = 0,
        steps_per_epoch: float | None = None,
        synchronization: str = "bsp",
        *,
        may_have_servers: bool = False,
    ) -> "Settings":
        """`may_have_servers`: means may be formed by servers, and these may hold the model."""
        made = COMPRESSION.parse(compression) if isinstance(compression, str) else compression
        if not isinstance(made, Compression) and is_compressor(made):
            made = OwnCompressor(made)
        if not isinstance(made, Compression):
            raise ValueError(
                'a compression is an expression such as "ef(topk(0.01))", an object of gradwire, '
                f"or one with compress and decompress, got {compression!r}. See: gradwire list "
                "compression"
            )
        placed = ARCHITECTURE.parse(architecture)
        rule = SYNCHRONIZATION.parse(synchronization)
        has_servers = placed.num_servers > 0 and may_have_servers
        if rule != BSP() and not (has_servers and isinstance(rule, ASP | SSP)):
            raise ValueError(
                f"synchronization={synchronization!r} with {placed!r}: a DistributedOptimizer "
                'averages gradients in every step, "bsp", or leaves the model to servers: "ssp(3)" '
                'or "asp", with architecture="parameter_server(2)". gradwire.local_sgd averages '
                "models rarely"
            )
        if has_servers and ability_of(rule, placed) != ("mean" if rule == BSP() else "push_pull"):
            raise ValueError(
                f"{placed!r} leaves the optimizer to servers, but here it is yours. Leave out "
                'optimizer="server"'
            )
        if not has_servers and ("mean" not in placed.offers or placed.num_others):
            raise ValueError(
                f"{placed!r}: here all ranks form means together, without other nodes. Take "
                "allreduce, ring, or another architecture of that kind."
            )
        return Settings(made, placed, seed, steps_per_epoch, rule)

    def described(self) -> dict[str, Any]:
        return {
            "compression": repr(self.compression),
            "architecture": repr(self.architecture),
            "synchronization": repr(self.synchronization),
            "seed": self.seed,
            "steps_per_epoch": self.steps_per_epoch,
        }
