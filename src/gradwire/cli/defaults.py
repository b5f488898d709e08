"""Default settings: those of a file, and under torchrun as many workers as ranks."""

import os
import tomllib
from pathlib import Path

from gradwire.experiment.run.config import Config


def world_size() -> int | None:
    """The number of ranks that torchrun or the launcher started; None if this is no rank."""
    size = os.environ.get("WORLD_SIZE")
    return int(size) if size and "RANK" in os.environ else None


def default_config(path: Path | None) -> Config:
    """The settings without flags."""
    settings = Config() if path is None else Config.from_toml(path)
    size = world_size()
    if size is None or (path is not None and "workers" in tomllib.loads(path.read_text())):
        return settings
    return Config(**{**vars(settings), "workers": size})
