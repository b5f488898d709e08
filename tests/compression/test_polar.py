"""Korada and Urbanke 2010: polar codes as quantisers of signs, Gaussians and gradients."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.coding.polar.gaussian import gaussian_channel
from gradwire.coding.polar.lanes import Lanes
from gradwire.coding.polar.planes import gaussian_planes, sign_plane
from gradwire.compression import COMPRESSION
from gradwire.compression.source_coding import polar
from gradwire.compression.source_coding.polar import Polar
from gradwire.core.codec import Codec, unpack
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.spec import Spec
from gradwire.experiment.studies.gradients import saved_gradients

KEY = Key(0).private(1)


def passed(codec: Codec | str, x: Tensor, key: Key = KEY) -> tuple[Tensor, float]:
    """What arrives, and bits per element."""
    codec = COMPRESSION.parse(codec) if isinstance(codec, str) else codec
    assert isinstance(codec, Codec)
    payload, _ = codec.encode(x, codec.init(Spec.of(x)), key)
    return codec.decode(payload, Spec.of(x), key), 8 * payload.buffer.numel() / x.numel()


def nmse(x: Tensor, y: Tensor) -> float:
    return float((x - y).double().square().sum() / x.double().square().sum())


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("rate", "goal"), [(0.1, 0.885), (0.25, 0.727), (0.5, 0.528), (1.5, 0.138), (2.0, 0.069)]
)
def test_a_gaussian_comes_close_to_shannons_bound(rate, goal) -> None:
    x = Key(3).normal(1 << 20)
    y, bits = passed(Polar(rate), x)
    assert bits == pytest.approx(rate, abs=0.001)
    assert 4**-rate < nmse(x, y) < goal + 0.0005  # of a sample of a million


@pytest.mark.few
@pytest.mark.parametrize(("rate", "reached"), [(0.75, 0.3788), (1.0, 0.2709)])
def test_three_planes_come_close_too(rate, reached) -> None:
    x = Key(3).normal(1 << 20)
    assert 4**-rate < nmse(x, passed(Polar(rate), x)[0]) < reached


def test_longer_blocks_are_better() -> None:
    x = Key(3).normal(1 << 19)
    errors = [nmse(x, passed(Polar(0.5, block=block), x)[0]) for block in (64, 256, 1024, 8192)]
    assert errors == sorted(errors, reverse=True)
    assert errors[2] < 0.5395  # .538 at N = 1024


def test_soft_beats_hard_signs_as_the_thesis_codes_them() -> None:
    x = Key(3).normal(1 << 19)
    soft = nmse(x, passed("polar(0.5, block=1024)", x)[0])
    hard = nmse(x, passed("sign >> polar(0.5, block=1024)", x)[0])
    # 1 - (2 / pi)(1 - 2 D)^2 for signs of which a fraction D is wrong.
    assert hard == pytest.approx(1 - 2 / torch.pi * (1 - 2 * 0.125) ** 2, abs=0.004)
    assert soft < hard - 0.09


def test_magnitudes_shrink_by_what_is_wrong() -> None:
    x = Key(3).normal(1 << 16)
    y, bits = passed("sign >> polar(0.5, block=1024)", x)
    _, wrong = sign_plane(0.5, Lanes(len(x), 1024))
    assert bits == pytest.approx(0.5, abs=0.01)
    assert torch.unique(y.abs()).tolist() == pytest.approx(
        [float(x.abs().mean()) * (1 - 2 * wrong)], rel=1e-5
    )
    found = float(((x < 0) != (y < 0)).float().mean())
    assert found == pytest.approx(wrong, abs=0.005)
    # No other magnitude has a smaller error, but for what the sample says about D.
    best = float((x * y.sign()).mean())
    assert float(y.abs()[0]) == pytest.approx(best, rel=0.02)


def test_the_scale_is_that_of_least_error() -> None:
    x = Key(3).normal(5000)
    y, _ = passed(Polar(0.5), x)
    assert float((x - y) @ y) == pytest.approx(0, abs=1e-3 * float(x @ x))


@pytest.mark.parametrize("rate", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("numel", [1, 2, 63, 64, 65, 257, 1000, 8191, 20_000])
def test_any_length_takes_the_bits_it_says(rate, numel) -> None:
    x = Key(3).normal(numel)
    codec = Polar(rate, block=256)
    payload, _ = codec.encode(x, None, KEY)
    lanes = Lanes(numel, 256)
    num_bits = lanes.num_blocks * max(1, round(rate * lanes.used))
    assert payload.parts["code"].numel() == -(-num_bits // 8)
    assert num_bits <= rate * (numel + lanes.num_blocks) + lanes.num_blocks
    y = codec.decode(payload, Spec.of(x), KEY)
    assert nmse(x, y) < 1


def test_shortened_blocks_are_as_good_as_whole_ones() -> None:
    whole, cut = Key(3).normal(64 * 1024), Key(3).normal(64 * 600)
    errors = [nmse(x, passed("polar(0.5, block=1024)", x)[0]) for x in (whole, cut)]
    assert errors[1] < errors[0] + 0.012  # 600 positions code a little worse than 1024


def test_rotation_makes_a_spike_a_gaussian_and_no_better() -> None:
    # Without the permutation, Walsh functions of the rotation would meet those of the code.
    x = torch.zeros(1 << 16)
    x[::4096] = 1.0
    spiky = nmse(x, passed("polar(0.5, rotate=True)", x)[0])
    assert 0.5 < spiky < 0.56
    gaussian = Key(3).normal(1 << 16)
    assert nmse(gaussian, passed("polar(0.5, rotate=True)", gaussian)[0]) == pytest.approx(
        spiky, abs=0.02
    )


@pytest.mark.few
@pytest.mark.parametrize("name", ["mlp early", "nanogpt late"])
def test_rotated_gradients_code_as_gaussians_do(name) -> None:
    x = saved_gradients()[name]
    for rate in (0.5, 1.0):
        assert nmse(x, passed(Polar(rate, rotate=True), x)[0]) < 4**-rate + 0.04


def test_survivors_fill_blocks_and_support_is_exact() -> None:
    x = Key(3).normal(40_000)
    y, bits = passed("topk(0.05) >> polar(1.0, rotate=True)", x)
    kept = x.abs() >= x.abs().sort().values[-2000]
    assert torch.equal(y != 0, kept)
    assert bits < 0.05 * 1.0 + 0.30  # support at h2(0.05) = 0.286
    assert nmse(x[kept], y[kept]) < 0.31


def test_points_and_channels_of_a_known_case() -> None:
    channel = gaussian_channel(0.5)
    # E[1 - h2(sigmoid(beta x))] = 1/2 at beta = 3.17, in units of an eighth nat.
    assert channel.slope / 8 == pytest.approx(3.173, abs=0.01)
    x = torch.linspace(-8, 8, 100_001, dtype=torch.float64)
    density = torch.exp(-x.square() / 2)
    point = float((density * x * torch.tanh(channel.slope / 16 * x)).sum() / density.sum())
    assert channel.points.tolist() == pytest.approx([-point, point], abs=0.001)
    for table in channel.channels:
        assert table.numel() == 1 << 16
        # Said of a bit, right or wrong: L is e^L times as often right as wrong.
        counts = torch.bincount(table.to(torch.int64) + 127, minlength=255).double()
        right, wrong = counts[127 + 8 : 127 + 24], counts[127 - 23 : 127 - 7].flip(0)
        ratios = (right / wrong).log() * 8
        assert torch.allclose(ratios, torch.arange(8, 24).double(), atol=0.8)


def test_the_rates_of_planes_add_up() -> None:
    planes = gaussian_planes(1.5, Lanes(1 << 16, 1024))
    assert planes.num_rows == round(1.5 * 1024)
    rates = [len(rows) / 1024 for rows in planes.rows]
    assert rates == sorted(rates)  # low bits say little, the sign nearly all


def test_both_backends_make_the_same_bytes(monkeypatch) -> None:
    if kernels.backend() != "native":
        pytest.skip("the C library was not built")
    x = Key(3).normal(3001)
    for text in ("polar(0.5, block=256)", "polar(2.0, block=256)", "sign >> polar(0.7, block=64)"):
        codec = COMPRESSION.parse(text)
        payload, _ = codec.encode(x, codec.init(Spec.of(x)), KEY)
        monkeypatch.setenv("GRADWIRE_KERNELS", "reference")
        again, _ = codec.encode(x, codec.init(Spec.of(x)), KEY)
        decoded = codec.decode(payload, Spec.of(x), KEY)
        monkeypatch.delenv("GRADWIRE_KERNELS")
        assert torch.equal(payload.buffer, again.buffer)
        assert torch.equal(decoded, codec.decode(payload, Spec.of(x), KEY))


def test_a_code_of_another_construction_is_refused() -> None:
    x = Key(3).normal(1000)
    payload, _ = Polar(0.5, block=256).encode(x, None, KEY)
    for other in (Polar(0.5, block=512), Polar(0.51, block=256)):
        with pytest.raises(WireError):
            unpack(other, payload.buffer, Spec.of(x))


def test_other_tables_at_the_receiver_are_noticed_in_chains_too(monkeypatch) -> None:
    x = Key(3).normal(1000)
    for text in ("polar(1.0, block=256)", "topk(0.3) >> polar(1.0, block=256)"):
        codec = COMPRESSION.parse(text)
        payload, _ = codec.encode(x, codec.init(Spec.of(x)), KEY)
        channel = gaussian_channel(1.0)
        other = replace(channel, digest=channel.digest ^ 1)
        monkeypatch.setattr(polar, "gaussian_channel", lambda rate, other=other: other)
        with pytest.raises(WireError):
            unpack(codec, payload.buffer, Spec.of(x))
        monkeypatch.undo()
        unpack(codec, payload.buffer, Spec.of(x))


def test_tiny_and_huge_vectors_keep_their_size() -> None:
    x = Key(3).normal(1000)
    expected, _ = passed(Polar(1.0, block=256), x)
    for factor in (1e-35, 1e-20, 1e20, 1e35):
        y, _ = passed(Polar(1.0, block=256), x * factor)
        assert nmse(expected, y / factor) < 1e-3  # a ratio may round the other way
        rotated, _ = passed(Polar(1.0, block=256, rotate=True), x * factor)
        assert nmse(x, rotated / factor) < 0.4


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("polar(0.0)", "bits per element, above 0"),
        ("polar(5.0)", "at most 4"),
        ("polar(0.5, block=1000)", "power of two"),
        ("sign >> polar(1.5)", "at most 1 bit"),
        ("sign >> polar(0.5, rotate=True)", "no rotation"),
        ("qsgd(7) >> polar(0.5)", "signs of `sign` only"),
        ("polar(0.5) >> fp16", "leaves nothing"),
    ],
)
def test_nonsense_is_refused(text, reason) -> None:
    with pytest.raises(ValueError, match=reason):
        COMPRESSION.parse(text)
