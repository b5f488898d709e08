"""Texts that stand for Python objects in a configuration.

    my.module:make_model#5f0c2e9a71b3    imported: `from my.module import make_model`
    object:MyNet#5f0c2e9a71b3            handed over to gradwire.simulate as an object

The fingerprint after # is added when a run begins; if there is one, what is found must have it.
"""

import importlib
import os
import re
import sys
from types import ModuleType
from typing import Any, NamedTuple

from gradwire.core.notation import nearest

LIVE = "object"  # in the place of a module
_FORM = re.compile(r"([\w.]+):([\w.]+)(?:#([0-9a-f]+))?")


class Reference(NamedTuple):
    module: str  # LIVE: an object that was handed over
    name: str
    fingerprint: str = ""

    def __str__(self) -> str:
        return f"{self.module}:{self.name}" + (f"#{self.fingerprint}" if self.fingerprint else "")

    @property
    def is_live(self) -> bool:
        return self.module == LIVE


def parse_reference(text: str) -> Reference | None:
    """None for other texts, such as mlp((64, 32))."""
    match = _FORM.fullmatch(text)
    return None if match is None else Reference(match[1], match[2], match[3] or "")


def reference_to(value: Any) -> Reference:
    """How a configuration names an object: to be imported if that gives this very object."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(module, str) and isinstance(name, str) and module in sys.modules:
        try:
            is_found = _attribute(sys.modules[module], name) is value
        except AttributeError:
            is_found = False
        if is_found and module != "__main__" and _FORM.fullmatch(f"{module}:{name}"):
            return Reference(module, name)
    own = getattr(value, "__name__", "") or type(value).__name__
    return Reference(LIVE, re.sub(r"\W", "", own) or "unnamed")


def import_reference(reference: Reference, setting: str) -> Any:
    """The object that a reference names. The current directory is importable."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)  # as under `python -m`; it stays for what the module imports later
    given = f"{setting} = {reference.module}:{reference.name}"
    try:
        module = importlib.import_module(reference.module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not (reference.module == missing or reference.module.startswith(f"{missing}.")):
            raise ValueError(f"{given}: importing it failed: {error}") from error
        raise ValueError(
            f"{given}: there is no module {missing}. Write MODULE:NAME, where MODULE is a file in "
            f"{here} (my_model.py is my_model) or an installed package."
        ) from None
    except Exception as error:
        raise ValueError(
            f"{given}: importing it failed: {type(error).__name__}: {error}"
        ) from error
    try:
        return _attribute(module, reference.name)
    except AttributeError:
        names = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and not isinstance(value, ModuleType)
        ]
        near = nearest(reference.name, names)
        raise ValueError(
            f"{given}: {module.__file__ or reference.module} has no {reference.name}."
            f"{f' Did you mean {near}?' if near else ''} It has: {', '.join(names) or 'nothing'}."
        ) from None


def _attribute(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part)
    return module
