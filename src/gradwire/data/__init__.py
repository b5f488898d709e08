"""Data sets, how they are dealt to workers, and the order in which workers draw from them.

The name of a data set is the name of the file that holds its `load()`: `load("cifar10")` runs
`data/cifar10.py`. A new data set is one new file here; there is no list to edit.
"""

import functools
import importlib
import pkgutil
from types import ModuleType

from gradwire.core.notation import unknown_name
from gradwire.data.dataset import Dataset
from gradwire.data.partition import ByLabel, ByRole, Dirichlet, Iid, Partition
from gradwire.data.sampler import Sampler

__all__ = [
    "ByLabel",
    "ByRole",
    "Dataset",
    "Dirichlet",
    "Iid",
    "Partition",
    "Sampler",
    "load",
    "names",
]


@functools.cache
def load(name: str) -> Dataset:
    """The data set of that name, read once per process.

    Raises ValueError for a name that does not exist and `DataError` for files that are missing,
    with what to put where.
    """
    module = _modules().get(name)
    if module is None:
        raise ValueError(unknown_name("data set", name, names()))
    dataset = module.load()
    assert isinstance(dataset, Dataset)
    assert dataset.name == name
    return dataset


def names() -> list[str]:
    """Every data set that `load` knows, in alphabetical order."""
    return sorted(_modules())


@functools.cache
def _modules() -> dict[str, ModuleType]:
    """The modules of this folder that define `load`; the others are helpers."""
    found = (
        importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)
    )
    return {m.__name__.rpartition(".")[2]: m for m in found if hasattr(m, "load")}
