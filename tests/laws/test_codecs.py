"""The laws of codecs, for every registered one and some chains."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire.testing import codec_laws, notation_laws
from gradwire.testing.codec_laws import CASES
from gradwire.testing.inputs import DTYPES, LAYOUTS, SHAPES, ZEROS, exponents, make_tensor


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    return make_tensor(
        dtype,
        draw(st.sampled_from(SHAPES)),
        draw(st.integers(*exponents(dtype))),
        draw(st.sampled_from(ZEROS)),
        draw(st.sampled_from(LAYOUTS)),
        draw(st.integers(0, 2**32)),
    )


@settings(max_examples=20, deadline=None)
@given(x=tensors())
def test_declared_size_is_what_the_network_counts(codec, x) -> None:
    codec_laws.declared_size_is_what_the_network_counts(codec, x)


@settings(max_examples=5, deadline=None)
@given(x=tensors())
def test_an_average_costs_what_its_payloads_weigh(codec, x) -> None:
    codec_laws.an_average_costs_what_its_payloads_weigh(codec, x)


@settings(max_examples=10, deadline=None)
@given(x=tensors())
def test_feedback_loses_nothing(codec, x) -> None:
    codec_laws.feedback_loses_nothing(codec, x)


@settings(max_examples=30, deadline=None)
@given(x=tensors())
def test_received_bytes_decode_to_what_was_encoded(codec, x) -> None:
    codec_laws.received_bytes_decode_to_what_was_encoded(codec, x)


@settings(max_examples=10, deadline=None)
@given(x=tensors())
def test_encoding_again_with_the_same_key_gives_the_same_bytes(codec, x) -> None:
    codec_laws.encoding_again_with_the_same_key_gives_the_same_bytes(codec, x)


@settings(max_examples=15, deadline=None)
@given(x=tensors())
def test_memory_layout_does_not_change_the_bytes(codec, x) -> None:
    codec_laws.memory_layout_does_not_change_the_bytes(codec, x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_decode_to_zeros(codec, dtype) -> None:
    codec_laws.zeros_decode_to_zeros(codec, dtype)


def test_a_gradient_that_needs_one_is_encoded_without_its_graph(codec) -> None:
    codec_laws.a_gradient_that_needs_one_is_encoded_without_its_graph(codec)


@pytest.mark.parametrize("case", CASES)
def test_the_stated_guarantee_holds(codec, case) -> None:
    codec_laws.the_stated_guarantee_holds(codec, case)


def test_a_guarantee_covers_every_length(codec) -> None:
    codec_laws.a_guarantee_covers_every_length(codec)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0,), (1,), (300,), (3, 5)], ids=str)
def test_linear_payloads_add(linear_codec, shape, dtype) -> None:
    codec_laws.linear_payloads_add(linear_codec, shape, dtype)


def test_payloads_that_merge_do_so_in_any_order(codec) -> None:
    codec_laws.payloads_that_merge_do_so_in_any_order(codec)


def test_what_is_written_parses_to_the_same(compression) -> None:
    notation_laws.what_is_written_parses_to_the_same(compression)


def test_every_pair_of_codecs_chains_or_is_refused_with_both_names(codec, codecs) -> None:
    codec_laws.every_pair_of_codecs_chains_or_is_refused_with_both_names(codec, codecs)


def test_a_layered_codec_feeds_back_what_it_lost_of_the_layers(codec) -> None:
    codec_laws.a_layered_codec_feeds_back_what_it_lost_of_the_layers(codec)
