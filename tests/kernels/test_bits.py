"""Bit packing: the reference against Python's big integers, native against the reference."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradwire import kernels
from gradwire.kernels.native import bits as native_bits
from gradwire.kernels.reference import bits as reference_bits

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
INTEGERS += [torch.uint16, torch.uint32, torch.uint64]
BACKENDS = pytest.mark.parametrize("bits", ["reference", "native"], indirect=True)
OVER_BACKENDS = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def bits(request):
    if request.param == "reference":
        return reference_bits
    request.getfixturevalue("native")
    return native_bits


def big_integer(values: list[int], width: int) -> bytes:
    """The layout by definition: value i is added at bit i * width of one large number."""
    total = sum(value << (i * width) for i, value in enumerate(values))
    return total.to_bytes(-(-len(values) * width // 8), "little")


@st.composite
def uints(draw):
    width = draw(st.integers(1, 32))
    return draw(st.lists(st.integers(0, 2**width - 1), max_size=70)), width


@BACKENDS
@OVER_BACKENDS
@given(uints())
def test_uints_follow_the_definition(bits, case):
    values, width = case
    packed = bits.pack_uints(torch.tensor(values, dtype=torch.int64), width)
    assert bytes(packed.tolist()) == big_integer(values, width)
    unpacked = bits.unpack_uints(packed, width, len(values))
    assert unpacked.tolist() == values
    assert unpacked.dtype == (torch.int64 if width == 32 else torch.int32)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("width", range(1, 33))
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 511, 512, 513, 1500])
def test_native_uints_equal_reference(width, count):
    generator = torch.Generator().manual_seed(width * 10_000 + count)
    values = torch.randint(0, 2**width, (count,), generator=generator)
    packed = native_bits.pack_uints(values, width)
    assert torch.equal(packed, reference_bits.pack_uints(values, width))
    unpacked = native_bits.unpack_uints(packed, width, count)
    assert torch.equal(unpacked, reference_bits.unpack_uints(packed, width, count))
    assert unpacked.dtype == reference_bits.unpack_uints(packed, width, count).dtype
    assert torch.equal(unpacked.to(torch.int64), values)


@BACKENDS
@pytest.mark.parametrize("width", [1, 3, 7, 13])
@pytest.mark.parametrize(
    "dtype",
    [torch.bool, *INTEGERS],
    ids=str,
)
def test_uints_of_any_integer_type(bits, dtype, width):
    largest = 1 if dtype == torch.bool else min(2**width - 1, 127)
    values = [i % (largest + 1) for i in range(100)]
    packed = bits.pack_uints(torch.tensor(values).to(dtype), width)
    assert bytes(packed.tolist()) == big_integer(values, width)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("width", "value"), [(1, 2), (4, 16), (4, -1), (7, -128), (6, 64)])
def test_uints_out_of_range_are_refused(bits, dtype, width, value):
    values = torch.zeros(1000, dtype=dtype)
    values[700] = value
    with pytest.raises(ValueError, match=rf"0 \.\. {2**width - 1}, got .* {value}\b"):
        bits.pack_uints(values, width)


@BACKENDS
@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.int32, -1), (torch.int64, 2**32), (torch.int64, -1)], ids=str
)
def test_uints_of_32_bits_are_not_bit_patterns(bits, dtype, value):
    with pytest.raises(ValueError, match=str(value)):
        bits.pack_uints(torch.tensor([value], dtype=dtype), 32)


@BACKENDS
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sign_bits_mean_less_than_zero(bits, dtype):
    tiny = torch.finfo(dtype).smallest_normal / 2  # denormal
    x = torch.tensor(
        [-1.0, 1.0, -0.0, 0.0, math.nan, -math.nan, -math.inf, math.inf, -tiny, tiny, -3.0],
        dtype=dtype,
    )
    packed = bits.pack_signs(x)
    assert packed.tolist() == [0b01000001, 0b101]
    signs = bits.unpack_signs(packed, 11, dtype)
    assert signs.dtype == dtype
    assert signs.tolist() == [-1, 1, 1, 1, 1, 1, -1, 1, -1, 1, -1]


@pytest.mark.usefixtures("native")
@OVER_BACKENDS
@given(st.sampled_from(FLOATS), st.integers(0, 1300), st.integers(0, 2**32))
def test_native_signs_equal_reference(dtype, count, seed):
    """On random bit patterns, so that every kind of number and NaN occurs."""
    size = count * dtype.itemsize
    x = torch.randint(
        0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    ).view(dtype)
    packed = native_bits.pack_signs(x)
    assert torch.equal(packed, reference_bits.pack_signs(x))
    assert torch.equal(
        native_bits.unpack_signs(packed, count, dtype),
        reference_bits.unpack_signs(packed, count, dtype),
    )


@BACKENDS
@OVER_BACKENDS
@given(st.lists(st.booleans(), max_size=200), st.data())
def test_ones_follow_the_definition(bits, wanted, data):
    positions = torch.tensor([i for i, one in enumerate(wanted) if one], dtype=torch.int64)
    packed = bits.pack_ones(positions, len(wanted))
    assert bytes(packed.tolist()) == big_integer([int(one) for one in wanted], 1)
    assert torch.equal(bits.ones_positions(packed, len(wanted)), positions)
    # Any order and repetition give the same bitmap; padding bits are not positions.
    if len(positions):
        shuffled = torch.tensor(data.draw(st.permutations(positions.tolist())) * 2)
        assert torch.equal(bits.pack_ones(shuffled, len(wanted)), packed)
    assert torch.equal(
        bits.ones_positions(torch.full_like(packed, 255), len(wanted)), torch.arange(len(wanted))
    )


@BACKENDS
@pytest.mark.parametrize("position", [-1, 10, 2**62, -(2**63)])
def test_positions_out_of_range_are_refused(bits, position):
    with pytest.raises(ValueError, match=rf"0 \.\. 9, got .*{position}"):
        bits.pack_ones(torch.tensor([3, position]), 10)


def test_views_and_misaligned_memory():
    values = torch.arange(64, dtype=torch.int32).reshape(8, 8)
    turned = kernels.pack_uints(values.t(), 6)
    assert torch.equal(turned, kernels.pack_uints(values.t().contiguous(), 6))
    x = torch.tensor([-1.0, 1.0, -2.0])
    memory = bytearray(b"\0" + x.numpy().tobytes())
    assert kernels.pack_signs(torch.frombuffer(memory, dtype=torch.float32, offset=1)) == 0b101
    packed = kernels.pack_uints(values, 6)
    shifted = torch.cat([packed.new_zeros(1), packed])[1:]
    assert torch.equal(kernels.unpack_uints(shifted, 6, 64), values.reshape(-1))


def test_the_default_device_does_not_matter():
    packed = torch.zeros(1, dtype=torch.uint8)
    with torch.device("meta"):
        assert kernels.unpack_uints(packed, 1, 8).device.type == "cpu"
        assert kernels.unpack_signs(packed, 8, torch.float32).device.type == "cpu"
        assert kernels.pack_ones(kernels.ones_positions(packed, 8), 8).device.type == "cpu"
        assert kernels.pack_signs(kernels.unpack_signs(packed, 8)).device.type == "cpu"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: kernels.unpack_uints(b, 3, 8), "3 bytes for 24 bits, got 4"),
        (lambda b: kernels.unpack_uints(b, 3, 11), "5 bytes for 33 bits, got 4"),
        (lambda b: kernels.unpack_uints(b, 3, -1), "count >= 0, got -1"),
        (lambda b: kernels.unpack_uints(b, 33, 1), "1 .. 32 bits, got 33"),
        (lambda b: kernels.unpack_uints(b.to(torch.int32), 8, 4), "uint8, got torch.int32"),
        (lambda b: kernels.pack_uints(b, 0), "1 .. 32 bits, got 0"),
        (lambda b: kernels.pack_uints(b.float(), 8), "integers, got torch.float32"),
        (lambda b: kernels.pack_signs(b), "float64, got torch.uint8"),
        (lambda b: kernels.unpack_signs(b, 33, torch.float32), "5 bytes for 33 bits, got 4"),
        (lambda b: kernels.unpack_signs(b, 32, torch.int8), "not torch.int8"),
        (lambda b: kernels.ones_positions(b, 24), "3 bytes for 24 bits, got 4"),
        (lambda b: kernels.ones_positions(b, -8), "num_bits >= 0, got -8"),
        (lambda b: kernels.pack_ones(b, 8), "int64 positions, got torch.uint8"),
        (lambda b: kernels.pack_ones(b.to(torch.int64), -1), "num_bits >= 0, got -1"),
    ],
)
def test_wrong_arguments_say_what_was_given_and_expected(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(4, dtype=torch.uint8))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("count", [0, 1, 4, 5, 6, 7, 8, 9, 41, 1000])
@pytest.mark.parametrize(("base", "digits"), [(2, 8), (3, 5), (4, 4), (5, 3), (6, 3), (16, 2)])
def test_native_digits_equal_reference(base, digits, count):
    values = torch.randint(0, base, (count,), generator=torch.Generator().manual_seed(count))
    packed = native_bits.pack_digits(values, base, digits)
    assert torch.equal(packed, reference_bits.pack_digits(values, base, digits))
    unpacked = native_bits.unpack_digits(packed, base, digits, count)
    assert torch.equal(unpacked, reference_bits.unpack_digits(packed, base, digits, count))
    assert unpacked.tolist() == values.tolist()


@BACKENDS
@pytest.mark.parametrize("value", [-1, 3])
def test_digits_out_of_range_are_refused(bits, value):
    with pytest.raises(ValueError, match=r"0 \.\. 2"):
        bits.pack_digits(torch.tensor([0, 1, value]), 3, 5)
