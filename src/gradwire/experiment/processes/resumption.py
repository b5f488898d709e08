"""From where a run on real processes goes on, given what each rank found.

If there is a checkpoint that all ranks can read, the newest such one counts. If there is none, the
run begins again from step 0: with a message if it has not come to its first checkpoint, or is of a
method that has none; but if there was one and files are damaged or missing, only if the user allows
it. The same holds if a server cannot read the updates since its last state: if the user allows it,
it goes on from that state without them.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from gradwire.experiment.run.record import Row, begin_again
from gradwire.training.plan import Plan


def checkpointed(plan: Plan, size: int) -> Sequence[int]:
    """The ranks that have checkpoints: all, or the servers where workers do not pause."""
    if plan.pauses:
        return range(size)
    first = plan.num_workers
    holds_model = plan.ability == "push_pull"
    return range(first, first + plan.architecture.num_servers) if holds_model else ()


def choose(
    reports: Sequence[Row | None],
    ranks: Sequence[int],
    name: Callable[[int], str],
    *,
    folder: Path | None,
    is_resumed: bool,
    had_complete: bool,
    may_restart: bool,
) -> Row:
    """The step to go on from (None: from the beginning), or why not, and what to print.

    A report has the `steps` that a rank can go on from, the files that it `skipped`, those without
    which acknowledged updates are `lost`, and whether what it has shows that
    all others had something too (`is_evidence`). `ranks` are those that have checkpoints in such a
    run; `had_complete`: there was a checkpoint of which all had their file.
    """
    offers = {rank: report for rank in ranks if (report := reports[rank]) is not None}

    def named(key: str) -> list[str]:
        return [f"{name(rank)}: {text}" for rank, offer in offers.items() for text in offer[key]]

    steps = [set(offer["steps"]) for offer in offers.values()]
    common = set.intersection(*steps) if steps else set()
    step = max(common) if common else None
    lost, skipped = named("lost"), named("skipped")
    if step is None:
        all_had = had_complete or any(offer["is_evidence"] for offer in offers.values())
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
            text = f"{folder}: no checkpoint can be used by all. {why}. {begin_again(folder)}"
        else:
            text = (
                f"{folder}: updates of servers cannot be read back. {why}. Put them back "
                "as they were, or go on from the older state, without those updates: "
                f"gradwire run --resume {folder} --restart"
            )
        return {"step": None, "failure": text, "notices": []}
    notices = [f"{text}; it is not used" for text in dict.fromkeys(skipped + lost)]
    if step is not None:
        notices += [
            f"{name(rank)} goes on from an older state: the updates since then are lost"
            for rank, offer in offers.items()
            if offer["lost"]
        ]
    elif is_resumed:
        notices.append(f"{_why(bool(lost), bool(offers))}: the run begins again from step 0")
    return {"step": step, "failure": "", "notices": notices}


def _why(is_lost: bool, has_checkpoints: bool) -> str:
    if is_lost:
        return "no checkpoint can be used by all"
    return "there is no checkpoint yet" if has_checkpoints else "this method has no checkpoints"
