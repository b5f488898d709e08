"""What the user chooses: the same on all ranks."""

from dataclasses import dataclass
from typing import Any

from gradwire.architecture import ARCHITECTURE
from gradwire.compression import COMPRESSION
from gradwire.core.codec import Compression
from gradwire.core.protocols import Architecture
from gradwire.integration.own_compressor import OwnCompressor, is_compressor


@dataclass(frozen=True)
class Settings:
    """How gradients are exchanged."""

    compression: Compression
    architecture: Architecture
    seed: int = 0
    steps_per_epoch: float | None = None  # for numbers that change with epochs

    @staticmethod
    def parse(
        compression: Any,
        architecture: str = "allreduce",
        seed: int = 0,
        steps_per_epoch: float | None = None,
    ) -> "Settings":
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
        if "mean" not in placed.offers or placed.num_others:
            raise ValueError(
                f"{placed!r}: here all ranks form means together, without other nodes. Take "
                "allreduce, ring, or another architecture of that kind."
            )
        return Settings(made, placed, seed, steps_per_epoch)

    def described(self) -> dict[str, Any]:
        return {
            "compression": repr(self.compression),
            "architecture": repr(self.architecture),
            "seed": self.seed,
            "steps_per_epoch": self.steps_per_epoch,
        }
