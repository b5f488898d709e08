"""Data sets, their partitions over workers, and the order in which workers draw examples.

The name of a data set is the name of the file that holds its `load()`: `load("cifar10")` runs
`data/cifar10.py`. A new data set is one new file here, or a function of a
package with an entry point in the group `gradwire.data`; there is no list to edit.
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import NamedTuple

from gradwire.core.notation import unknown_name
from gradwire.core.plugins import leave_out, load_plugins
from gradwire.data.dataset import Dataset
from gradwire.data.partition import ByLabel, ByRole, DataPartition, Dirichlet, Iid
from gradwire.data.sampler import Sampler

__all__ = [
    "ByLabel",
    "ByRole",
    "DataPartition",
    "Dataset",
    "Dirichlet",
    "Iid",
    "Sampler",
    "load",
    "names",
    "register",
]


@functools.cache
def load(name: str) -> Dataset:
    """The data set of that name, read once per process.

    Raises ValueError for a name that does not exist and `DataError` for files that are missing,
    with what to put where.
    """
    loader = _loaders().get(name)
    if loader is None:
        raise ValueError(unknown_name("data set", name, names()))
    dataset = loader.load()
    assert isinstance(dataset, Dataset), f"{loader.origin} returned no Dataset"
    assert dataset.name == name, f"{loader.origin} returned a data set with name={dataset.name!r}"
    return dataset


def names() -> list[str]:
    """Every data set that `load` knows, in alphabetical order."""
    return sorted(_loaders())


def register(function: Callable[[], Dataset]) -> None:
    """Adds a function that returns a data set; the function's name is that of the data set."""
    name, origin = _name(function), _place(function)
    other = _loaders().get(name)
    if other is not None and other.origin != origin:
        raise ValueError(f"{origin} {_taken(name, other)}")
    _loaders()[name] = _Loader(function, origin)
    load.cache_clear()


class _Loader(NamedTuple):
    load: Callable[[], Dataset]
    origin: str  # for messages


@functools.cache
def _loaders() -> dict[str, _Loader]:
    """By name: modules of this folder that define `load` (the others are helpers), and plugins."""
    found: dict[str, _Loader] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        if hasattr(module, "load"):
            found[info.name] = _Loader(module.load, _place(module.load))
    for value, origin in load_plugins(__name__):
        function = getattr(value, "load", value) if isinstance(value, ModuleType) else value
        if not isinstance(function, FunctionType):
            leave_out(origin, "has no data set: expected a function, or a module with load()")
        elif (name := _name(function)) in found:
            leave_out(origin, _taken(name, found[name]))
        else:
            found[name] = _Loader(function, origin)
    return found


def _name(function: Callable[[], Dataset]) -> str:
    """Of the data set that a function returns: its own, or of `load` that of its file."""
    name = function.__name__
    return function.__module__.rpartition(".")[2] if name == "load" else name


def _place(function: Callable[[], Dataset]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _taken(name: str, other: _Loader) -> str:
    return f"has a name that exists already: data set {name!r} is {other.origin}. Use another name"
