"""Damaged codes: Triton's decoders give what the reference gives, or refuse them in its words."""

import pytest
import torch

from gradwire.kernels.reference import elias, gaps

pytest.importorskip("triton", reason="Triton is not installed")

TRIALS = range(16)


def damaged(code, trial):
    """A byte changed, bytes missing, or bytes too many."""
    generator = torch.Generator().manual_seed(trial)
    place = int(torch.randint(len(code), (1,), generator=generator))
    if trial % 4 == 0:
        return code[:place]
    if trial % 4 == 1:
        return torch.cat([code, torch.zeros(trial % 3, dtype=torch.uint8)])
    code = code.clone()
    code[place] ^= 1 << int(torch.randint(8, (1,), generator=generator))
    return code


def outcome(decode, *arguments):
    try:
        decoded = decode(*arguments)
    except ValueError as error:
        return str(error)
    return [part.tolist() if isinstance(part, torch.Tensor) else part for part in decoded]


def test_rice():
    from gradwire.kernels.triton import gaps as triton

    universe, count, parameter = 5000, 300, 3
    generator = torch.Generator().manual_seed(0)
    indices = torch.randperm(universe, generator=generator)[:count].sort().values
    middle, sums, _ = gaps.measure_gaps(indices, universe)
    assert middle == parameter
    code = gaps.encode_rice(indices, parameter, sums[1])[1:]
    refused = 0
    for trial in TRIALS:
        given = damaged(code, trial)
        if len(given) * 8 < count * parameter:
            continue  # refused before
        expected = outcome(gaps.decode_rice, given, parameter, universe, count)
        refused += isinstance(expected, str)
        assert outcome(triton.decode_rice, given, parameter, universe, count) == expected
    assert 2 < refused < 15


@pytest.mark.parametrize("delta", [False, True])
def test_elias(delta):
    from gradwire.kernels.triton import elias as triton

    count, largest = 300, 1000
    values = torch.randint(1, largest, (count,), generator=torch.Generator().manual_seed(0))
    code = elias.elias_encode(values, elias.elias_lengths(values), delta)
    refused = 0
    for trial in TRIALS:
        given = damaged(code, trial)
        expected = outcome(elias.elias_decode, given, count, largest, delta)
        refused += isinstance(expected, str)
        assert outcome(triton.elias_decode, given, count, largest, delta) == expected
    assert 2 < refused < 15


def test_symbols():
    from gradwire.kernels.triton import elias as triton

    symbols, alphabet, centre = torch.arange(300, dtype=torch.int32) * 7 % 10, 10, 2
    lengths = elias.elias_symbol_lengths(torch.bincount(symbols), centre)
    code = elias.elias_encode(symbols, lengths, False, centre)
    for trial in TRIALS:
        arguments = damaged(code, trial), 300, alphabet, centre, False
        expected = outcome(elias.elias_decode_symbols, *arguments)
        assert outcome(triton.elias_decode_symbols, *arguments) == expected


def test_integers_that_have_no_code_or_other_lengths_are_refused():
    from gradwire.kernels.triton import elias as triton

    for values in ([1, 0], [2**56], [-3, 5]):
        with pytest.raises(ValueError, match=r"of 1 .. 2\^56 - 1"):
            triton.elias_lengths(torch.tensor(values))
    with pytest.raises(ValueError, match="other lengths"):
        triton.elias_encode(torch.tensor([1, 2**40]), [2] + 63 * [0], False)


@pytest.mark.parametrize("indices", [[1, 1], [3, 2], [-1, 4], [1, 10]])
def test_indices_that_do_not_increase_are_refused(indices):
    from gradwire.kernels.triton import gaps as triton

    with pytest.raises(ValueError, match="strictly increasing"):
        triton.measure_gaps(torch.tensor(indices), 10)
    with pytest.raises(ValueError, match="do not add up"):
        triton.encode_rice(torch.tensor([1, 5, 9]), 1, 99)
