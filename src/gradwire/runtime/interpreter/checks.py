"""What no program may ask for, on any engine."""

from math import inf
from typing import Any

from gradwire.core.node import RecvAny, Send, Sleep


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


def unknown(effect: Any, rank: int) -> TypeError:
    return TypeError(f"rank {rank} awaited {effect!r}, which is no effect")
