"""Saved states of local updates: which of them a rank loads, and when their number may differ.

Between two averages every rank has a model of its own. What a rank that is gone has changed since
the last one is in its model only, and a new rank has no model. So states are loaded by another
number of ranks only if they were saved when all ranks had the same model.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.integration.local_updates.context import Saved

Row = Mapping[str, Any]


def rows_to_load(saved: Saved, rank: int, size: int, origin: Callable[[Row], Row]) -> list[Row]:
    """The state of this rank alone, or those of all ranks if there was another number of them.

    `origin` has the rank and the size of a state.
    """
    rows = [saved] if isinstance(saved, Mapping) else list(saved)
    for row in rows:
        if not isinstance(row, Mapping) or row.get("version") != 1:
            raise ValueError(
                "the saved state is not one of this version: load what state_dict() returned, that "
                "of this rank or a list of those of all ranks"
            )
    if not rows:
        raise ValueError("an empty list of states: give those of all ranks")
    origins = [(origin(row)["rank"], origin(row)["size"]) for row in rows]
    count = origins[0][1]
    if len(rows) == 1 and origins[0] == (rank, size):
        return rows
    if origins != [(other, count) for other in range(count)]:
        of = ", ".join(f"rank {other} of {n}" for other, n in origins)
        raise ValueError(
            f"states of {of}, this is rank {rank} of {size}: give that of this rank, or a list of "
            "those of all ranks in order"
        )
    return [rows[rank]] if count == size else rows


def check_unchanged(
    walked: Sequence[int], models: Sequence[Sequence[Tensor]], size: int, method: str
) -> None:
    """Raises unless all ranks had the same model when they were saved.

    `walked`: steps of each rank since the last average; `models`: the models after that.
    """
    problem = ""
    for rank, (steps, model) in enumerate(zip(walked, models)):
        if steps:
            problem = f"rank {rank} had taken {steps} steps since the last average"
        elif not all(torch.equal(a, b) for a, b in zip(model, models[0])):
            problem = f"rank {rank} had another model than rank 0"
        if problem:
            break
    if problem:
        raise ValueError(
            f"the states of {len(models)} ranks cannot be loaded by {size}: {problem}, and what "
            f"ranks that are gone have learned would be lost. Save after {method}; or load them "
            f"with {len(models)} ranks, call {method} there and save again"
        )
