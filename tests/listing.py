"""Files of runs that are under way: folders may vanish while they are listed."""

import glob
from pathlib import Path


def live_glob(folder: Path, pattern: str) -> list[Path]:
    """What matches, sorted. Unlike `Path.glob`, which raises when a folder vanishes meanwhile."""
    return sorted(folder / name for name in glob.glob(pattern, root_dir=folder))
