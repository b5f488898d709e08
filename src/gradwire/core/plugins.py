"""What installed packages add: entry points of groups such as `gradwire.compression`.

A group is read when its registry is first asked for a name, so that help and errors in the
arguments import no plugin. A plugin that cannot be imported is left out with a warning.
"""

import warnings
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

from gradwire.core.errors import GradwireWarning


class Plugin(NamedTuple):
    """What an entry point names, and where it comes from, for messages."""

    value: Any
    origin: str


def load_plugins(group: str) -> Iterator[Plugin]:
    """Everything that installed packages offer in this group, in a fixed order."""
    if not group:
        return
    for entry in sorted(entry_points(group=group), key=lambda each: (each.name, each.value)):
        origin = _origin(entry)
        try:
            value = entry.load()
        except Exception as error:  # whatever the plugin's module raises
            leave_out(origin, f"cannot be imported: {type(error).__name__}: {error}")
            continue
        yield Plugin(value, origin)


def leave_out(origin: str, reason: str) -> None:
    """Warns that a plugin is not used."""
    warnings.warn(f"plugin {origin} is left out: it {reason}", GradwireWarning, stacklevel=2)


def _origin(entry: EntryPoint) -> str:
    package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unnamed package"
    return f"{entry.name} = {entry.value} of {package}"
