"""Laws of magnitudes: what holds for numbers around 1 holds in the whole range of float32.

Powers of two scale exactly, so a method that knows no absolute magnitude makes the same error of
2^k x as of x, and the stated guarantees hold from 1e-37 to 1e36.
"""

import math

import torch
from torch import Tensor

from gradwire.core.codec import Codec, Kind
from gradwire.core.reducer import Reducer
from gradwire.core.spec import Spec
from gradwire.testing.guarantees import assert_guarantee, decodings, relative_errors
from gradwire.testing.laws import Laws, NotApplicable
from gradwire.testing.reducer_laws import gradient, run_means

RANGE_LAWS = Laws()
REDUCER_RANGE_LAWS = Laws()
MAGNITUDES = (1e-37, 1e-33, 1e30, 1e36)
EXPONENTS = (-122, -109, 90, 100, 119)
TINY = torch.finfo(torch.float32).tiny


def gaussian() -> Tensor:
    """Zero or at least 1/16: times 2^-122 every element is zero or normal."""
    x = torch.randn(300, generator=torch.Generator().manual_seed(5))
    return torch.where(x.abs() >= 1 / 16, x, torch.zeros(300))


def close() -> Tensor:
    """Half a step of four bits apart, so that steps that are too large cost most."""
    x = torch.full((64,), 0.5 + 1 / 16)
    x[3], x[40] = 1.0, -1.0
    return x


def scaled(x: Tensor, factor: float, within: tuple[float, float] | None = None) -> Tensor:
    """x times a factor, without elements beyond the normal range, or beyond `within`."""
    low, high = within or (TINY, torch.inf)
    y = (x.double() * factor).float()
    return torch.where((y.abs() >= low) & (y.abs() <= high), y, torch.zeros_like(y))


@RANGE_LAWS()
def the_stated_guarantee_holds_at_every_magnitude(codec: Codec) -> None:
    guarantee = codec.guarantee(Spec((300,), torch.float32))
    if guarantee.omega is None and guarantee.delta is None:
        raise NotApplicable("states none")
    low, high = guarantee.within or (TINY, torch.inf)
    magnitudes = MAGNITUDES if guarantee.within is None else (low, 8 * low, high / 8, high)
    for magnitude in magnitudes:
        y = scaled(gaussian(), magnitude, guarantee.within)
        assert y.any()
        assert_guarantee(codec, y, num_keys=50)
    assert_guarantee(codec, scaled(close(), 2 * low), num_keys=50)


@RANGE_LAWS()
def errors_are_the_same_at_every_magnitude(codec: Codec) -> None:
    if codec.traits.takes is Kind.SYMBOLS:
        raise NotApplicable("codes no numbers")
    if codec.guarantee(Spec((300,), torch.float32)).within is not None:
        raise NotApplicable("has a range of its own")
    x = gaussian()
    expected = float(relative_errors(decodings(codec, x, 3), x).mean())
    for exponent in EXPONENTS:
        y = scaled(x, 2.0**exponent)
        error = float(relative_errors(decodings(codec, y, 3), y).mean())
        close_enough = math.isclose(error, expected, rel_tol=0.01, abs_tol=1e-6)
        assert close_enough, f"{error} at 2^{exponent}, {expected} at 1"


@REDUCER_RANGE_LAWS(shape=((12, 10), (300,)))
def means_are_the_same_at_every_magnitude(reducer: Reducer, shape: tuple[int, ...]) -> None:
    """Of three workers over three steps, so that what is remembered is scaled, too."""

    def means(exponent: int) -> Tensor:
        def inputs(rank: int, step: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return (gradient(rank, step, shape, torch.float64) * 2.0**exponent).to(dtype)

        results, _ = run_means(reducer, 3, shape, range(3), inputs=inputs)
        return torch.stack([result.mean for result in results[0]]).double() * 2.0**-exponent

    expected = means(0)
    for exponent in (*EXPONENTS[:-1], 117):
        difference = means(exponent) - expected
        assert float(difference.norm() / expected.norm()) <= 1e-3, f"at 2^{exponent}"
