"""What a kernel found out about a tensor that it made, kept with the tensor.

To read a number from a device the host has to wait for it. A selection reads once what is known of
its result, and the operations that come next ask here first. A note does not outlive a change of
the tensor, and is not about its copies and views.
"""

from typing import Any

from torch import Tensor

_NAME = "_gradwire_note"
_Note = tuple[int, int, dict[str, Any]]  # of which tensor, at which version, what
_NOTHING: _Note = (-1, -1, {})


def note(tensor: Tensor, **facts: Any) -> Tensor:
    """The same tensor, with facts about its elements as they are now."""
    if not tensor.is_inference():  # those do not count their changes
        # A deep copy has the same attributes, and versions of its own.
        setattr(tensor, _NAME, (id(tensor), tensor._version, facts))
    return tensor


def note_more(tensor: Tensor, **facts: Any) -> Tensor:
    """As `note`, besides what is known already."""
    return note(tensor, **{**_valid(tensor), **facts})


def noted(tensor: Tensor, fact: str) -> Any:
    """A fact about a tensor, None if it is not known."""
    return _valid(tensor).get(fact)


def _valid(tensor: Tensor) -> dict[str, Any]:
    of, version, facts = getattr(tensor, _NAME, _NOTHING)
    return facts if of == id(tensor) and version == tensor._version else {}
