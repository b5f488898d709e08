"""rANS: a code worked by hand, the reference against it, native against the reference."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradwire import kernels
from gradwire.core.key import Key
from gradwire.kernels.native import rans as native_rans
from gradwire.kernels.reference import rans as reference_rans

BACKENDS = pytest.mark.parametrize("rans", ["reference", "native"], indirect=True)
OVER_BACKENDS = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def rans(request):
    if request.param == "reference":
        return reference_rans
    request.getfixturevalue("native")
    return native_rans


def by_definition(symbols: list[int], frequencies: list[int], precision: int, lanes: int) -> bytes:
    """One symbol at a time in Python's integers."""
    states, words = [1 << 16] * lanes, []
    for i in reversed(range(len(symbols))):
        f, c = frequencies[symbols[i]], sum(frequencies[: symbols[i]])
        x = states[i % lanes]
        if x >= f << (32 - precision):
            words.append(x & 0xFFFF)
            x >>= 16
        states[i % lanes] = ((x // f) << precision) + c + x % f
    data = b"".join(x.to_bytes(4, "little") for x in states)
    return data + b"".join(word.to_bytes(2, "little") for word in reversed(words))


@st.composite
def cases(draw):
    precision = draw(st.integers(2, 15))
    alphabet = draw(st.integers(1, min(20, 1 << precision)))
    cuts = draw(
        st.sets(st.integers(1, (1 << precision) - 1), min_size=alphabet - 1, max_size=alphabet - 1)
    )
    edges = [0, *sorted(cuts), 1 << precision]
    frequencies = [b - a for a, b in itertools.pairwise(edges)]
    symbols = draw(st.lists(st.integers(0, alphabet - 1), max_size=150))
    return symbols, frequencies, precision, draw(st.sampled_from((1, 2, 3, 8, 64)))


@BACKENDS
@OVER_BACKENDS
@given(case=cases())
def test_codes_follow_the_definition(rans, case):
    symbols, frequencies, precision, lanes = case
    table = torch.tensor(frequencies)
    packed = rans.rans_encode(torch.tensor(symbols, dtype=torch.int32), table, precision, lanes)
    assert bytes(packed.tolist()) == by_definition(symbols, frequencies, precision, lanes)
    assert rans.rans_decode(packed, table, precision, lanes, len(symbols)).tolist() == symbols


@BACKENDS
def test_one_push_by_hand(rans):
    # f = 3, c = 1, M = 4: 65536 = 3 * 21845 + 1, so x = 4 * 21845 + 1 + 1.
    packed = rans.rans_encode(torch.tensor([1]), torch.tensor([1, 3]), 2, 1)
    assert int.from_bytes(bytes(packed.tolist()), "little") == 4 * 21845 + 2


@pytest.mark.few(2)
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("lanes", [1, 32, 1024])
@pytest.mark.parametrize("precision", [8, 12, 14, 15])
def test_native_equals_reference_on_long_messages(lanes, precision):
    count = 3000 if lanes == 1 else 100_000
    symbols = (Key(1).normal(count) * 2).round().clamp(-7, 7).int() + 7
    frequencies = torch.full((15,), 3)
    frequencies[7] += (1 << precision) - 45
    packed = native_rans.rans_encode(symbols, frequencies, precision, lanes)
    assert torch.equal(packed, reference_rans.rans_encode(symbols, frequencies, precision, lanes))
    for rans in (native_rans, reference_rans):
        assert torch.equal(rans.rans_decode(packed, frequencies, precision, lanes, count), symbols)


@BACKENDS
@OVER_BACKENDS
@given(data=st.binary(max_size=60), count=st.integers(0, 60), lanes=st.sampled_from((1, 4)))
def test_random_words_are_refused_or_symbols(rans, data, count, lanes):
    states = torch.tensor([0, 0, 1, 0] * lanes, dtype=torch.uint8)
    words = torch.tensor(list(data[: len(data) // 2 * 2]), dtype=torch.uint8)
    frequencies = torch.tensor([1, 10, 5])
    try:
        symbols = rans.rans_decode(torch.cat([states, words]), frequencies, 4, lanes, count)
    except ValueError:
        return
    again = rans.rans_encode(symbols, frequencies, 4, lanes)
    assert torch.equal(again, torch.cat([states, words]))  # a code that decodes is the code


@BACKENDS
@pytest.mark.parametrize("symbols", [[0, 1, 2], [0, 3], [-1]], ids=str)
def test_a_symbol_without_a_frequency_is_refused(rans, symbols):
    with pytest.raises(ValueError, match="has no frequency"):
        rans.rans_encode(torch.tensor(symbols), torch.tensor([3, 1, 0]), 2, 1)


def test_arguments_are_checked():
    symbols, good = torch.tensor([0, 1]), torch.tensor([1, 3])
    for frequencies in ([1, 2], [5, -1], []):
        with pytest.raises(ValueError, match="add up to 4"):
            kernels.rans_encode(symbols, torch.tensor(frequencies, dtype=torch.int64), 2, 1)
    with pytest.raises(ValueError, match="precision"):
        kernels.rans_encode(symbols, good, 16, 1)
    with pytest.raises(ValueError, match="lanes"):
        kernels.rans_encode(symbols, good, 2, 0)
    packed = kernels.rans_encode(symbols, good, 2, 1)
    for wrong in (packed[:3], packed[:0], torch.cat([packed, packed[:1]]), packed.int()):
        with pytest.raises(ValueError, match="rans_decode takes"):
            kernels.rans_decode(wrong, good, 2, 1, 2)
    with pytest.raises(ValueError, match="below"):
        kernels.rans_decode(torch.zeros(4, dtype=torch.uint8), good, 2, 1, 2)
    with pytest.raises(ValueError, match="count"):
        kernels.rans_decode(packed, good, 2, 1, -1)
