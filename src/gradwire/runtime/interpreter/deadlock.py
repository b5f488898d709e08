"""The report of a deadlock: every program waits for something that will not come."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradwire.core.node import (
    Collective,
    Compute,
    CurrentMembers,
    Exchange,
    Join,
    Now,
    Pass,
    Reach,
    Recv,
    RecvAny,
    RunningProgram,
    Sleep,
    Tag,
)


def report(
    tasks: Iterable[RunningProgram[Any]],
    inboxes: Sequence[Mapping[tuple[int, Tag], Any]],
    gone: Mapping[int, float | None],
) -> str:
    """What each program waits for, the messages that are unread, and the nodes that are gone."""
    lines = ["every program waits and no message is under way:"]
    lines += [
        f"  rank {task.rank} waits for {described(task.waiting_for)}"
        for task in tasks
        if not task.done
    ]
    lines += [
        f"  rank {rank} has an unread message from rank {src}, tag {tag!r}"
        for rank, inbox in enumerate(inboxes)
        for src, tag in inbox
    ]
    lines += [
        f"  rank {rank} is not there yet"
        if crashed_s is None
        else f"  rank {rank} crashed at {crashed_s:.6g} s"
        for rank, crashed_s in sorted(gone.items())
    ]
    return "\n".join(lines)


def described(effect: Any) -> str:
    if isinstance(effect, Recv):
        return f"a message from rank {effect.src}, tag {effect.tag!r}"
    if isinstance(effect, RecvAny):
        return f"a message from any rank, tag {effect.tag!r}"
    if isinstance(effect, Exchange):
        return f"messages from {len(effect.members) - 1} members of a group, tag {effect.tag!r}"
    if isinstance(effect, Pass):
        return f"messages around a ring of {len(effect.members)} members, tag {effect.tag!r}"
    if isinstance(effect, Join):
        return f"the end of a program it spawned on rank {effect.task.rank}"
    if isinstance(effect, Reach):
        return f"the gradient of layer {effect.layer}"
    return _NAMES.get(type(effect), type(effect).__name__)


_NAMES: dict[type, str] = {
    Compute: "a gradient",
    Collective: "a native collective",
    Sleep: "the end of a pause",
    Now: "the time",
    CurrentMembers: "the members",
}
