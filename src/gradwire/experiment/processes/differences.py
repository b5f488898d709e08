"""Whether all nodes of a run have the same settings, and the message for each of them if not."""

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest

from gradwire.experiment.run.config import common_settings

_MAX_NAMED = 3  # nodes in one message


def differences(
    configs: Sequence[str], coordinator: int, name: Callable[[int], str]
) -> dict[str, str]:
    """By rank: the settings in which a configuration (in TOML) differs from the coordinator's."""
    found = {}
    for rank, config in enumerate(configs):
        lines = zip_longest(
            common_settings(config), common_settings(configs[coordinator]), fillvalue=""
        )
        texts = [
            f"{own} where {name(coordinator)} has {other}" for own, other in lines if own != other
        ]
        if texts:
            found[str(rank)] = f"{name(rank)} has {', '.join(texts)}{_hint(texts)}"
    return found


def _hint(texts: Sequence[str]) -> str:
    """What to do if the fingerprint of a user's own model or data differs."""
    if not any(text.startswith(("model = ", "data = ")) and "#" in text for text in texts):
        return ""
    return (
        " (what comes after # is the fingerprint of the initial parameters or of the data: give a "
        "function that makes it, or seed torch before you do)"
    )


def summarize_differences(differs: Mapping[str, str]) -> str:
    """The message for nodes that have the settings of the coordinator."""
    some, num_more = list(differs.values())[:_MAX_NAMED], max(0, len(differs) - _MAX_NAMED)
    return "; ".join(some) + (f"; and {num_more} more differ" if num_more else "")
