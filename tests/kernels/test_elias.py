"""Elias' codes: the reference against their definition, native against the reference."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradwire import kernels
from gradwire.core.key import Key
from gradwire.kernels.native import elias as native_elias
from gradwire.kernels.reference import elias as reference_elias

BACKENDS = pytest.mark.parametrize("elias", ["reference", "native"], indirect=True)
CODES = pytest.mark.parametrize("delta", [False, True], ids=["gamma", "delta"])
OVER_BACKENDS = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
INTEGERS = st.integers(0, 55).flatmap(lambda bits: st.integers(1 << bits, (2 << bits) - 1))


@pytest.fixture
def elias(request):
    if request.param == "reference":
        return reference_elias
    request.getfixturevalue("native")
    return native_elias


def to_bytes(bits: str) -> bytes:
    """Bits in the order of the stream."""
    return int("0" + bits[::-1], 2).to_bytes(-(-len(bits) // 8), "little")


def by_definition(values: list[int], delta: bool) -> bytes:
    def low(v: int) -> str:
        return f"{v:b}"[1:][::-1]  # the lowest bit first

    lengths = [v.bit_length() for v in values]
    first = lengths if delta else values
    parts = ["".join("0" * (v.bit_length() - 1) + "1" for v in first)]
    if delta:
        parts.append("".join(low(v) for v in lengths))
    return b"".join(map(to_bytes, [*parts, "".join(low(v) for v in values)]))


@pytest.mark.few(2)
@BACKENDS
@CODES
@OVER_BACKENDS
@given(values=st.lists(INTEGERS, max_size=60), tail=st.binary(max_size=12))
def test_codes_follow_the_definition(elias, delta, values, tail):
    integers = torch.tensor(values, dtype=torch.int64)
    lengths = elias.elias_lengths(integers)
    assert lengths == [sum(v.bit_length() == i + 1 for v in values) for i in range(64)]
    packed = elias.elias_encode(integers, lengths, delta)
    assert bytes(packed.tolist()) == by_definition(values, delta)
    assert packed.numel() == sum(kernels.elias_sizes(lengths, delta))
    ahead = torch.cat([packed, torch.tensor(list(tail), dtype=torch.uint8)])
    found, used = elias.elias_decode(ahead, len(values), 2**56 - 1, delta)
    assert (found.tolist(), used) == (values, packed.numel())


@BACKENDS
@CODES
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("count", [1, 2, 1000, 20_001])
def test_symbols_are_integers_by_their_distance(elias, delta, dtype, count):
    symbols = (Key(count).normal(count) * 4).round().clamp(-7, 7).to(torch.int64) + 7
    counts = torch.bincount(symbols, minlength=15)
    for centre in (0, 7, 14):
        distance = symbols - centre
        integers = torch.where(distance < 0, -2 * distance, 2 * distance + 1)
        lengths = elias.elias_symbol_lengths(counts, centre)
        assert lengths == elias.elias_lengths(integers)
        packed = elias.elias_encode(symbols.to(dtype), lengths, delta, centre)
        assert torch.equal(packed, reference_elias.elias_encode(integers, lengths, delta))
        found, used = elias.elias_decode_symbols(packed, count, 15, centre, delta)
        assert found.dtype == torch.int32
        assert torch.equal(found, symbols.int())
        assert used == packed.numel()


@pytest.mark.usefixtures("native")
@CODES
@given(
    data=st.binary(max_size=60),
    count=st.integers(0, 60),
    largest=st.sampled_from((1, 2, 15, 100, 2**20, 2**56 - 1)),
)
def test_both_refuse_the_same_bytes(delta, data, count, largest):
    packed = torch.tensor(list(data), dtype=torch.uint8)

    def outcome(decode, *arguments):
        try:
            found, used = decode(packed, count, *arguments, delta)
        except ValueError as error:
            return str(error)
        return found.tolist(), used

    a, b = (outcome(e.elias_decode, largest) for e in (native_elias, reference_elias))
    assert a == b
    if isinstance(a, tuple):
        assert all(1 <= value <= largest for value in a[0])
    a, b = (outcome(e.elias_decode_symbols, 9, 4) for e in (native_elias, reference_elias))
    assert a == b


@BACKENDS
@pytest.mark.parametrize("values", [[0], [1, -3], [2**56], [5, 2**62]], ids=str)
def test_integers_without_a_code_are_refused(elias, values):
    with pytest.raises(ValueError, match=r"1 \.\. 2\^56 - 1, got"):
        elias.elias_lengths(torch.tensor(values))


@BACKENDS
@CODES
def test_other_lengths_than_stated_are_refused(elias, delta):
    values = torch.tensor([1, 2, 9, 300])
    for other in ([1, 2, 9, 2**50], [1] * 4, [2**40] * 4, [1, 2, 9]):
        with pytest.raises(ValueError, match="other lengths"):
            elias.elias_encode(values, elias.elias_lengths(torch.tensor(other)), delta)


def test_arguments_are_checked():
    packed = torch.zeros(3, dtype=torch.uint8)
    with pytest.raises(ValueError, match="int64"):
        kernels.elias_lengths(torch.ones(3))
    with pytest.raises(ValueError, match="int64"):
        kernels.elias_encode(torch.ones(3, dtype=torch.int32), [3] + [0] * 63, False)
    for largest in (0, 2**56):
        with pytest.raises(ValueError, match="up to"):
            kernels.elias_decode(packed, 1, largest, False)
    with pytest.raises(ValueError, match="count"):
        kernels.elias_decode(packed, -1, 5, False)
    with pytest.raises(ValueError, match="uint8"):
        kernels.elias_decode(packed.int(), 1, 5, False)
