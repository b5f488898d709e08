"""Python objects that a user hands over beside a configuration, which is plain text.

A setting such as `model` then has a text that stands for the object (`own/reference.py`). What can
be imported again needs no object: its text is enough, also on other processes and to resume.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from gradwire.core.notation import Expression
from gradwire.experiment.run.config import Config
from gradwire.own.reference import LIVE, Reference, import_reference, parse_reference, reference_to

_NAMES = ("model", "data", "loss", "metric", "collate")


@dataclass(frozen=True)
class Given:
    """The objects that were handed over; None: none."""

    model: Any = None
    data: Any = None
    loss: Any = None
    metric: Any = None
    collate: Any = None

    def find(self, setting: str, text: str) -> Any:
        """The object for which the text of a setting stands."""
        reference = parse_reference(text)
        assert reference is not None
        found = getattr(self, setting)
        if found is None and not reference.is_live:
            return import_reference(reference, setting)
        if found is None:
            raise ValueError(
                f"{setting} = {text} was given to gradwire as a Python object, which a record does "
                f"not hold. Give it again from Python, gradwire.simulate(..., {setting}=...) or "
                f"gradwire.resume(FOLDER, {setting}=...), or write {setting} = MODULE:NAME from "
                "the beginning, which is imported."
            )
        return found


NOTHING = Given()


def split_given(settings: Mapping[str, Any]) -> tuple[dict[str, Any], Given]:
    """The settings as texts, and the objects among them."""
    texts, objects = dict(settings), {}
    for name in _NAMES:
        value = texts.get(name)
        if value is None:
            texts.pop(name, None)
        elif not isinstance(value, str | Expression):
            reference = _reference(name, value)
            texts[name] = str(reference)
            if reference.is_live:
                objects[name] = value
    return texts, Given(**objects)


def given_again(config: Config, objects: Mapping[str, Any]) -> Given:
    """The objects for a run that is resumed, whose configuration names them."""
    given = {name: value for name, value in objects.items() if value is not None}
    for name in given:
        if name not in _NAMES:
            raise ValueError(
                f"a run is resumed with its own settings: give no {name}, only the objects that it "
                f"had, {', '.join(_NAMES)}"
            )
        text = getattr(config, name)
        if parse_reference(text) is None:
            raise ValueError(
                f"{name} was given, but this run has {name} = {text!r}, which needs no object: "
                f"leave out {name}"
            )
    return Given(**given)


def _reference(setting: str, value: Any) -> Reference:
    if setting == "data" and not callable(value):
        train = value[0] if isinstance(value, tuple | list) and value else value
        name = "tensors" if isinstance(train, tuple | list) else type(train).__name__
        return Reference(LIVE, name)
    if setting == "model" and isinstance(value, nn.Module):
        return Reference(LIVE, type(value).__name__)
    return reference_to(value)
