"""Counting symbols and finding the rare ones: native and reference."""

import pytest
import torch

from gradwire import kernels
from gradwire.core.key import Key
from gradwire.kernels.native import symbols as native_symbols
from gradwire.kernels.reference import symbols as reference_symbols

BACKENDS = pytest.mark.parametrize("backend", ["reference", "native"], indirect=True)
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int16, torch.int32, torch.int64], ids=str
)


@pytest.fixture
def backend(request):
    if request.param == "reference":
        return reference_symbols
    request.getfixturevalue("native")
    return native_symbols


@BACKENDS
@DTYPES
@pytest.mark.parametrize("alphabet", [1, 2, 15, 200, 1024, 1025, 5000])
@pytest.mark.parametrize("count", [0, 1, 3, 1001])
def test_counts(backend, dtype, alphabet, count):
    symbols = (Key(1).words(count).to(torch.int64).abs() % min(alphabet, 200)).to(dtype)
    expected = [0] * alphabet
    for symbol in symbols.tolist():
        expected[symbol] += 1
    assert backend.count_symbols(symbols, alphabet).tolist() == expected
    for frequent in (0, alphabet // 2):
        where = [i for i, symbol in enumerate(symbols.tolist()) if symbol != frequent]
        positions, others = backend.find_others(symbols, frequent, len(where))
        assert positions.tolist() == where
        assert (others + (others >= frequent)).tolist() == symbols[where].tolist()
        assert (others.dtype, positions.dtype) == (torch.int32, torch.int64)
        for wrong in {len(where) + 1, max(0, len(where) - 1)} - {len(where)}:
            with pytest.raises(ValueError, match=f"not {wrong} symbols"):
                backend.find_others(symbols, frequent, wrong)


@BACKENDS
@pytest.mark.parametrize("alphabet", [4, 3000])
@pytest.mark.parametrize("symbol", [-1, 3000, 2**40])
def test_what_is_no_symbol_is_refused(backend, alphabet, symbol):
    with pytest.raises(ValueError, match=rf"expected 0 \.\. {alphabet - 1}"):
        backend.count_symbols(torch.tensor([1, 2, 3, 0, symbol, 1]), alphabet)


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="integers"):
        kernels.count_symbols(torch.ones(3), 4)
    with pytest.raises(ValueError, match="alphabet"):
        kernels.count_symbols(torch.ones(3, dtype=torch.int32), 0)
    assert kernels.count_symbols(torch.tensor([True, False, True]), 2).tolist() == [1, 2]
