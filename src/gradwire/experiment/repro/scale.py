"""How much of a published table is measured. Imports nothing: the command line's help shows it."""

from typing import Literal, get_args

Scale = Literal["smoke", "small", "full"]
SCALES: tuple[Scale, ...] = get_args(Scale)
