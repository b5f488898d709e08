import pytest
import torch

from gradwire.core.key import Key
from gradwire.data.augment import PADDING, crop_and_flip

NUM, SIZE = 600, 12
# distinct positive pixels, so that every crop can be told from every other
IMAGE = torch.arange(1.0, 2 * SIZE * SIZE + 1).reshape(2, SIZE, SIZE)


def crops() -> torch.Tensor:
    """Every possible result, [2 * 81, 2, SIZE, SIZE]."""
    padded = torch.nn.functional.pad(IMAGE, (PADDING,) * 4)
    offsets = range(2 * PADDING + 1)
    plain = [padded[:, i : i + SIZE, j : j + SIZE] for i in offsets for j in offsets]
    return torch.stack(plain + [crop.flip(-1) for crop in plain])


def test_gives_every_crop_about_equally_often() -> None:
    results = crop_and_flip(IMAGE.expand(NUM, 2, SIZE, SIZE), Key(3))
    same = (results[:, None] == crops()[None]).flatten(2).all(dim=2)  # [NUM, 162]
    assert (same.sum(dim=1) == 1).all()
    counts = same.sum(dim=0)
    assert (counts > 0).sum() > 150  # of 162, at 3.7 draws each
    assert 240 < counts[:81].sum() < 360  # not flipped: half, five deviations


def test_is_a_function_of_the_key() -> None:
    batch = Key(5).normal(4 * 3 * 32 * 32).reshape(4, 3, 32, 32)
    assert torch.equal(crop_and_flip(batch, Key(1)), crop_and_flip(batch, Key(1)))
    assert not torch.equal(crop_and_flip(batch, Key(1)), crop_and_flip(batch, Key(2)))


def test_workers_together_draw_what_one_draws() -> None:
    batch = Key(5).normal(8 * 3 * 32 * 32).reshape(8, 3, 32, 32)
    parts = [crop_and_flip(batch[i : i + 2], Key(1), first=i) for i in range(0, 8, 2)]
    assert torch.equal(torch.cat(parts), crop_and_flip(batch, Key(1)))


def test_needs_images() -> None:
    with pytest.raises(ValueError, match=r"\[N, C, H, W\], got \[2, 12, 12\]"):
        crop_and_flip(IMAGE, Key(1))
