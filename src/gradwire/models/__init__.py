"""The networks of the experiments, one per file, each an expression such as `mlp((64, 32))`."""

from gradwire.models.base import Model, build_seeded

__all__ = ["Model", "build_seeded"]
