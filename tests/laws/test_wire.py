"""What arrives may be anything: every codec answers `WireError` or a tensor of the right shape."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.testing import wire_laws
from gradwire.testing.wire_laws import NO_BYTES


def test_what_was_sent_is_accepted(codec) -> None:
    wire_laws.what_was_sent_is_accepted(codec)


def test_every_truncation_is_refused(codec) -> None:
    wire_laws.every_truncation_is_refused(codec)


def test_bytes_too_many_are_refused(codec) -> None:
    wire_laws.bytes_too_many_are_refused(codec)


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF], ids=hex)
def test_every_flipped_byte_is_refused(codec, mask) -> None:
    wire_laws.every_flipped_byte_is_refused(codec, mask)


def test_bytes_of_another_codec_are_refused(codec, codecs) -> None:
    wire_laws.bytes_of_another_codec_are_refused(codec, codecs)


def test_bytes_of_another_tensor_are_refused(codec) -> None:
    wire_laws.bytes_of_another_tensor_are_refused(codec)


@pytest.mark.parametrize("buffer", NO_BYTES, ids=["float32", "int8", "matrix"])
def test_only_vectors_of_bytes_are_unpacked(codec, buffer) -> None:
    wire_laws.only_vectors_of_bytes_are_unpacked(codec, buffer)


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=80))
def test_random_bytes_are_refused(codec, data) -> None:
    wire_laws.random_bytes_are_refused(codec, data)


@settings(max_examples=80, deadline=None)
@given(changes=st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1))
def test_damage_with_a_valid_checksum_never_crashes(codec, changes) -> None:
    wire_laws.damage_with_a_valid_checksum_never_crashes(codec, changes[:6])


def test_every_byte_at_its_extremes_with_a_valid_checksum_never_crashes(codec) -> None:
    wire_laws.every_byte_at_its_extremes_with_a_valid_checksum_never_crashes(codec)


def test_damaged_side_information_of_a_long_tensor_never_crashes(codec) -> None:
    wire_laws.damaged_side_information_of_a_long_tensor_never_crashes(codec)


def test_a_part_of_another_dtype_is_refused(codec) -> None:
    wire_laws.a_part_of_another_dtype_is_refused(codec)


def test_a_part_of_another_length_never_crashes(codec) -> None:
    wire_laws.a_part_of_another_length_never_crashes(codec)


def test_extreme_values_in_any_part_never_crash(codec) -> None:
    wire_laws.extreme_values_in_any_part_never_crash(codec)


def test_parts_in_another_number_are_refused(codec) -> None:
    wire_laws.parts_in_another_number_are_refused(codec)


@pytest.mark.parametrize("exponent", [31, 40, 62])
def test_a_huge_declared_length_is_refused_without_allocating(codec, exponent) -> None:
    wire_laws.a_huge_declared_length_is_refused_without_allocating(codec, exponent)


@settings(max_examples=25, deadline=None)
@given(
    crafted=st.lists(
        st.tuples(st.binary(max_size=24), st.sampled_from((torch.uint8, torch.float32))),
        min_size=4,
        max_size=4,
    ),
    numel=st.integers(0, 40),
)
def test_crafted_parts_for_any_tensor_never_crash(codec, crafted, numel) -> None:
    wire_laws.crafted_parts_for_any_tensor_never_crash(codec, crafted, numel)
