"""Chooses the checkpoint from which a run on real processes continues, given the ranks' reports.

The newest checkpoint that all ranks can read is used. If there is none, the run begins again from
step 0. If it had not reached its first checkpoint, or its method has none, it does so with a
message. If there was one and files are damaged or missing, it does so only if the user allows it.
The same holds if a server cannot read the updates since its last state: if the user allows it, the
server continues from that state without them.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from gradwire.experiment.run.record import Row, restart_advice
from gradwire.training.plan import Plan


def ranks_with_checkpoints(plan: Plan) -> Sequence[int]:
    """All ranks; if workers do not pause, the servers that hold the model."""
    if plan.pauses:
        return range(plan.layout.size)
    return plan.layout.servers if plan.ability == "push_pull" else ()


def choose_checkpoint(
    reports: Sequence[Row | None],
    ranks: Sequence[int],
    name: Callable[[int], str],
    *,
    folder: Path | None,
    is_resumed: bool,
    had_complete: bool,
    may_restart: bool,
) -> Row:
    """The step to continue from (None: from the beginning), or a failure; and notices to print.

    A report has the `steps` of the checkpoints that a rank can read, the files that it `skipped`,
    those without which acknowledged updates are `lost`, and whether its state `has_updates`, which
    all others must then have, too. `ranks` are those that have checkpoints in such a run.
    `had_complete`: there was a checkpoint of which all had their file.
    """
    offers = {rank: report for rank in ranks if (report := reports[rank]) is not None}

    def named(key: str) -> list[str]:
        return [f"{name(rank)}: {text}" for rank, offer in offers.items() for text in offer[key]]

    steps = [set(offer["steps"]) for offer in offers.values()]
    common = set.intersection(*steps) if steps else set()
    step = max(common) if common else None
    lost, skipped = named("lost"), named("skipped")
    if step is None:
        all_had = had_complete or any(offer["has_updates"] for offer in offers.values())
        lost += skipped + [
            f"{name(rank)} has no file of a checkpoint"
            for rank, offer in offers.items()
            if all_had and not (offer["steps"] or offer["skipped"] or offer["lost"])
        ]
        if all_had and not lost:
            lost = ["the ranks have files of different steps"]
    if lost and is_resumed and not may_restart:
        why = "; ".join(lost)
        if step is None:
            text = f"{folder}: no checkpoint can be used by all. {why}. {restart_advice(folder)}"
        else:
            text = (
                f"{folder}: updates of servers cannot be read back. {why}. Put them back "
                "as they were, or continue from the older state, without those updates: "
                f"gradwire run --resume {folder} --restart"
            )
        return {"step": None, "failure": text, "notices": []}
    notices = [f"{text}; it is not used" for text in dict.fromkeys(skipped + lost)]
    if step is not None:
        notices += [
            f"{name(rank)} continues from an older state: the updates since then are lost"
            for rank, offer in offers.items()
            if offer["lost"]
        ]
    elif is_resumed:
        notices.append(f"{_why_none(bool(lost), bool(offers))}: the run begins again from step 0")
    return {"step": step, "failure": "", "notices": notices}


def _why_none(is_lost: bool, has_checkpoints: bool) -> str:
    """Why there is no checkpoint to continue from."""
    if is_lost:
        return "no checkpoint can be used by all"
    return "there is no checkpoint yet" if has_checkpoints else "this method has no checkpoints"
