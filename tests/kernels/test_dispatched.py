"""Every operation that the dispatch may load from a module of `kernels/triton` is there."""

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import pytest

from gradwire import kernels
from gradwire.kernels._dispatch import InTriton

pytest.importorskip("triton", reason="Triton is not installed")


def dispatched() -> Iterator[tuple[str, str, str]]:
    """Module, name of its `InTriton`, operation: as they are written in the sources."""
    for found in pkgutil.iter_modules(kernels.__path__):
        if found.ispkg:
            continue
        module = importlib.import_module(f"{kernels.__name__}.{found.name}")
        names = {name for name, value in vars(module).items() if isinstance(value, InTriton)}
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            match node:
                case ast.Attribute(value=ast.Name(id=name), attr=operation) if name in names:
                    yield found.name, name, operation


OPERATIONS = sorted(set(dispatched()))


def test_there_are_operations():
    assert len(OPERATIONS) > 50
    assert {"_signs", "_levels", "_selection", "_elias", "_tables"} <= {m for m, _, _ in OPERATIONS}


@pytest.mark.parametrize(("module", "name", "operation"), OPERATIONS)
def test_every_operation_resolves(module, name, operation):
    backend = getattr(importlib.import_module(f"{kernels.__name__}.{module}"), name)
    assert callable(getattr(backend, operation)()), f"{module} asks Triton for {operation}"
