"""Checks a stated guarantee on one vector under many keys."""

import math

import torch
from torch import Tensor

from gradwire.core.codec import Codec
from gradwire.core.key import Key
from gradwire.core.spec import Spec


def decodings(codec: Codec, x: Tensor, num_keys: int) -> Tensor:
    """C(x) under different keys, in float64; few where the key makes no difference."""
    spec, state = Spec.of(x), codec.init(Spec.of(x))
    out: list[Tensor] = []
    for i in range(num_keys):
        key = Key(seed=1, step=i).private(0)
        payload, _ = codec.encode(x, state, key)
        out.append(codec.decode(payload, spec, key).double())
        if i == 5 and all(torch.equal(out[0], other) for other in out):
            break
    return torch.stack(out)  # [num_keys, d]


def relative_errors(decoded: Tensor, x: Tensor) -> Tensor:
    """|C(x) - x|^2 / |x|^2 under each key."""
    exact = x.double()
    return (decoded - exact).square().sum(dim=1) / exact.square().sum()


def assert_guarantee(codec: Codec, x: Tensor, num_keys: int) -> None:
    guarantee = codec.guarantee(Spec.of(x))
    decoded, exact = decodings(codec, x, num_keys), x.double()
    energy = float(exact.square().sum())
    errors = relative_errors(decoded, x)
    standard_error = float(errors.std()) / math.sqrt(len(errors))
    slack = 6 * standard_error + 1e-12
    if guarantee.delta is not None:
        assert 0 <= guarantee.delta <= 1
        assert float(errors.mean()) <= 1 - guarantee.delta + slack
    if guarantee.omega is not None:
        assert guarantee.omega >= 0
        assert float(errors.mean()) <= guarantee.omega + slack
        # E C(x) = x. The mean over N keys has a squared error of at most omega / N, and in one
        # dimension 36 times that is six standard deviations.
        bias = (decoded.mean(dim=0) - exact).square().sum() / energy
        assert float(bias) <= 36 * guarantee.omega / len(decoded) + 1e-12
        if len(decoded) >= 50 and x.count_nonzero() >= 100:
            # The mean shrinkage is far sharper: many independent errors average out in it.
            along = decoded @ exact / energy
            assert abs(float(along.mean()) - 1) <= 6 * float(along.std()) / math.sqrt(len(along))
