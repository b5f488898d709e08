"""What the kernel tests share: the native backend is tested where it was built."""

import pytest

from gradwire.kernels.native import _library


@pytest.fixture
def native() -> None:
    """Skips a test of the C library, with the reason, where there is none."""
    try:
        _library.load()
    except _library.LibraryError as error:
        pytest.skip(f"needs the native kernels, but {error}")
