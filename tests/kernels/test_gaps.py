"""Rice's code of gaps: the reference against its definition, native against the reference."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradwire import kernels
from gradwire.core.key import Key
from gradwire.kernels.native import gaps as native_gaps
from gradwire.kernels.reference import gaps as reference_gaps

BACKENDS = pytest.mark.parametrize("gaps", ["reference", "native"], indirect=True)
OVER_BACKENDS = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def gaps(request):
    if request.param == "reference":
        return reference_gaps
    request.getfixturevalue("native")
    return native_gaps


def tensor(indices) -> torch.Tensor:
    return torch.tensor(indices, dtype=torch.int64)


def by_definition(indices: list[int], parameter: int) -> tuple[bytes, int]:
    low = unary = low_at = unary_at = 0
    before = -1
    for index in indices:
        gap = index - before - 1
        low |= (gap % 2**parameter) << low_at
        low_at += parameter
        unary_at += gap >> parameter
        unary |= 1 << unary_at
        unary_at += 1
        before = index
    streams = low.to_bytes(-(-low_at // 8), "little") + unary.to_bytes(-(-unary_at // 8), "little")
    return bytes([1 + parameter]) + streams, unary_at - len(indices)


@st.composite
def sets(draw):
    universe = draw(st.sampled_from((1, 40, 5000, 2**20)))
    return sorted(draw(st.sets(st.integers(0, universe - 1), max_size=70))), universe


@BACKENDS
@OVER_BACKENDS
@given(case=sets(), extra=st.integers(0, 3))
def test_codes_follow_the_definition(gaps, case, extra):
    indices, universe = case
    middle, sums, lengths = gaps.measure_gaps(tensor(indices), universe)
    steps = [b - a for a, b in zip([-1, *indices], indices)]
    mean = max(1, sum(step - 1 for step in steps) // max(1, len(steps)))
    assert middle == (mean.bit_length() - 1 if steps else 0)
    first = max(0, middle - 1)
    assert sums == [sum((step - 1) >> first + i for step in steps) for i in range(3)]
    assert lengths == [sum(step.bit_length() == i + 1 for step in steps) for i in range(64)]
    parameter = middle + extra
    expected, quotients = by_definition(indices, parameter)
    packed = gaps.encode_rice(tensor(indices), parameter, quotients)
    assert bytes(packed.tolist()) == expected
    assert gaps.decode_rice(packed[1:], parameter, universe, len(indices)).tolist() == indices


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("universe", [1000, 100_000, 10_000_000, 2**45])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 999, 50_001])
def test_native_equals_reference_on_large_sets(universe, count):
    count = min(count, universe // 2)
    drawn = Key(count).words(count).to(torch.int64).abs() * (universe // 2**32 + 1) % universe
    indices = drawn.unique()
    assert native_gaps.measure_gaps(indices, universe) == reference_gaps.measure_gaps(
        indices, universe
    )
    for parameter, quotients in kernels.measure_gaps(indices, universe).quotients.items():
        packed = native_gaps.encode_rice(indices, parameter, quotients)
        assert torch.equal(packed, reference_gaps.encode_rice(indices, parameter, quotients))
        for gaps in (native_gaps, reference_gaps):
            found = gaps.decode_rice(packed[1:], parameter, universe, len(indices))
            assert torch.equal(found, indices)


@pytest.mark.usefixtures("native")
@given(
    data=st.binary(max_size=60),
    count=st.integers(0, 60),
    parameter=st.sampled_from((0, 1, 2, 5, 13, 31)),
    universe=st.sampled_from((10, 100, 1000, 2**40)),
)
def test_both_refuse_the_same_bytes(data, count, parameter, universe):
    body = torch.tensor(list(data), dtype=torch.uint8)
    found = []
    for gaps in (native_gaps, reference_gaps):
        if body.numel() * 8 < count * parameter:
            return
        try:
            indices = gaps.decode_rice(body, parameter, universe, count)
        except ValueError as error:
            found.append(str(error))
            continue
        assert indices.tolist() == sorted(set(indices.tolist()))
        assert all(0 <= index < universe for index in indices.tolist())
        found.append(indices.tolist())
    assert found[0] == found[1]


@BACKENDS
@pytest.mark.parametrize("indices", [[3, 3], [4, 1], [-1], [10], [0, -5, 3], [2**62, -(2**62)]])
def test_what_is_not_a_sorted_set_is_refused(gaps, indices):
    with pytest.raises(ValueError, match=r"strictly increasing in 0 \.\. 9, got"):
        gaps.measure_gaps(tensor(indices), 10)


@BACKENDS
@pytest.mark.parametrize("quotients", [0, 1, 20, 1000])
def test_another_sum_of_quotients_is_refused(gaps, quotients):
    with pytest.raises(ValueError, match=f"do not add up to {quotients}"):
        gaps.encode_rice(tensor([5, 80, 200]), 3, quotients)


def test_views_and_misaligned_bytes_come_back():
    indices = torch.arange(0, 3000, 3).repeat_interleave(2)[::2]
    quotients = kernels.measure_gaps(indices, 3000).quotients
    packed = kernels.encode_rice(indices, 1, quotients[1])
    assert torch.equal(kernels.decode_rice(packed[1:], 1, 3000, 1000), indices)
    spread = torch.zeros(packed.numel(), 2, dtype=torch.uint8)
    spread[:, 0] = packed
    assert torch.equal(kernels.decode_rice(spread[1:, 0], 1, 3000, 1000), indices)


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="int64"):
        kernels.measure_gaps(torch.arange(3, dtype=torch.int32), 10)
    with pytest.raises(ValueError, match="universe"):
        kernels.measure_gaps(torch.arange(3), -1)
    body = torch.zeros(3, dtype=torch.uint8)
    for parameter, universe, count in ((32, 10, 1), (-1, 10, 1), (2, 10, -1), (25, 10, 1)):
        with pytest.raises(ValueError, match=r"parameter|count|low parts"):
            kernels.decode_rice(body, parameter, universe, count)
    with pytest.raises(ValueError, match="cannot count"):
        kernels.decode_rice(body, 2, 2**62, 1)
