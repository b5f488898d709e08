"""What holds without flags: the settings of a file, and under torchrun as many workers as ranks."""

import os
import tomllib
from pathlib import Path

from gradwire.experiment.run.config import Config


def world_size() -> int | None:
    """Of torchrun's process group, or our launcher's; None if this process is no rank."""
    size = os.environ.get("WORLD_SIZE")
    return int(size) if size and "RANK" in os.environ else None


def usual_config(path: Path | None) -> Config:
    """What holds without flags: under torchrun there are as many workers as ranks."""
    settings = Config() if path is None else Config.from_toml(path)
    size = world_size()
    if size is None or (path is not None and "workers" in tomllib.loads(path.read_text())):
        return settings
    return Config(**{**vars(settings), "workers": size})
