"""Count sketches: C gives the bits of the torch reference, and the reference what it says."""

import pytest
import torch

from gradwire import kernels
from gradwire.core.key import Key
from gradwire.kernels.native import sketch as native_sketch
from gradwire.kernels.reference import sketch as reference


def hashes(rows: int) -> torch.Tensor:
    words = Key(3).words(4 * rows).to(torch.int64).view(2, 2, rows)
    return (words[0] << 32) | (words[1] & 0xFFFFFFFF)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 70_007])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 17), (5, 1000), (65, 9)])
def test_sketch_and_medians_are_those_of_the_reference(
    native, threads, count, rows, columns
) -> None:
    x = torch.randn(count, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        table = native_sketch.sketch(x, hashes(rows), columns)
        medians = native_sketch.sketch_medians(table, hashes(rows), count)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(table, reference.sketch(x, hashes(rows), columns))
    assert torch.equal(medians, reference.sketch_medians(table, hashes(rows), count))


def test_by_hand() -> None:
    # a = 2^32 3, b = 0: the upper words are 3 i, so 0 3 6 9; signs + - + -, columns all 0.
    by_hand = torch.tensor([[3 << 32], [0]])
    x = torch.tensor([1.0, 10.0, 100.0, 1000.0])
    table = kernels.sketch(x, by_hand, 4)
    assert table.tolist() == [[1.0 - 10 + 100 - 1000, 0, 0, 0]]
    assert kernels.sketch_medians(table, by_hand, 4).tolist() == [-909, 909, -909, 909]


def test_nonsense_is_refused() -> None:
    x = torch.ones(4)
    with pytest.raises(ValueError, match="hashes int64"):
        kernels.sketch(x, hashes(3)[0], 4)
    with pytest.raises(ValueError, match="columns"):
        kernels.sketch(x, hashes(3), 0)
    with pytest.raises(ValueError, match="odd number of rows"):
        kernels.sketch_medians(torch.ones(2, 4), hashes(2), 4)
