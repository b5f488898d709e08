"""What a kernel found out about a tensor that it made, kept with the tensor.

To read a number from a device the host has to wait for it. A selection reads once what is known of
its result, and the operations that come next ask here first. A note does not outlive a change of
the tensor, and is not about its copies and views.
"""

from typing import Any

from torch import Tensor

_NAME = "_gradwire_note"
_NOTHING: tuple[int | None, dict[str, Any]] = (None, {})


def note(tensor: Tensor, **facts: Any) -> Tensor:
    """The same tensor, with facts about its elements as they are now."""
    if not tensor.is_inference():  # those do not count their changes
        setattr(tensor, _NAME, (tensor._version, facts))
    return tensor


def note_more(tensor: Tensor, **facts: Any) -> Tensor:
    """As `note`, besides what is known already."""
    version, known = getattr(tensor, _NAME, _NOTHING)
    is_valid = not tensor.is_inference() and version == tensor._version
    return note(tensor, **(known if is_valid else {}), **facts)


def noted(tensor: Tensor, fact: str) -> Any:
    """A fact about a tensor, None if it is not known."""
    version, facts = getattr(tensor, _NAME, _NOTHING)
    return facts.get(fact) if version is not None and version == tensor._version else None
