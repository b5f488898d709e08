"""Refusals of effects that no engine answers."""

from math import inf
from typing import Any, NoReturn

from gradwire.core.node import Recv, RecvAny, RunningProgram, Send, Sleep


def check_send(effect: Send, rank: int, num_nodes: int) -> None:
    if not 0 <= effect.dst < num_nodes:
        raise ValueError(f"rank {rank} sends to {effect.dst}; there are ranks 0 .. {num_nodes - 1}")


def check_sleep(effect: Sleep, rank: int) -> None:
    if not effect.seconds >= 0:
        raise ValueError(f"rank {rank} sleeps for {effect.seconds} s, below zero")


def check_wait(effect: RecvAny[Any], rank: int) -> None:
    if effect.timeout_s is not None and not 0 <= effect.timeout_s < inf:
        raise ValueError(
            f"rank {rank} waits for {effect.timeout_s} s; a timeout is finite and >= 0"
        )


def already_waits(effect: Recv | RecvAny[Any], rank: int) -> RuntimeError:
    """Two programs of a node wait for the same message."""
    sender = "anyone" if isinstance(effect, RecvAny) else effect.src
    return RuntimeError(f"rank {rank} already waits for {effect.tag!r} from {sender}")


def refuse_unknown(task: RunningProgram[Any], effect: Any) -> NoReturn:
    raise TypeError(f"rank {task.rank} awaited {effect!r}, which is no effect")
