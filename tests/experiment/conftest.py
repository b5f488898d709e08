"""Codecs that a test registers end with it: other tests of the process go through all classes."""

import sys
from collections.abc import Iterator

import pytest

from gradwire.compression import COMPRESSION


@pytest.fixture
def own_codecs_are_forgotten() -> Iterator[None]:
    classes, origins = dict(COMPRESSION._classes), dict(COMPRESSION._origins)
    modules = set(sys.modules)
    yield
    added = set(COMPRESSION._classes) - set(classes)
    homes = {COMPRESSION._classes[name].__module__ for name in added}
    COMPRESSION._classes, COMPRESSION._origins = classes, origins
    for name in homes - modules:  # so that they register again when they are imported again
        del sys.modules[name]
