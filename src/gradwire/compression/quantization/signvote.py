"""Majority vote on every sign (Bernstein et al. 2018, "signSGD: compressed optimisation for
non-convex problems", Alg. 3; 2019, "signSGD with majority vote is communication efficient and
fault tolerant", Alg. 1).

Workers send sign(g_m) and all step along sign(sum_m sign(g_m)). Here what is averaged decodes to
`scale` times that sign, and the optimizer multiplies by its learning rate.

The vote is taken in the compressed domain. A payload holds how many voted and, for each element,
how many of them for minus, in binary: one bit of all elements after the other, bit planes of
ceil(d / 8) bytes. So n voters take ceil(log2(n + 1)) bits per element, payloads merge by an adder
of bitwise operations that serves eight elements a byte, and the order does not matter. Before it
goes out to all, the result is finalized to the one bit that counts.

We differ in this: sign(0) and a tie are +1, where the papers leave them open or at random; and a
worker whose tensor is all zero (a frozen layer, an empty batch) abstains, so that zeros stay zero
if no worker votes.

Use it to run signSGD itself, with one bit per element in both directions and a majority that a few
bad workers cannot turn; not with `ef(...)`, and with a learning rate made for steps of equal size.
If the step shall follow the gradient's magnitude take `ef(sign)`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.core.codec import (
    Algebra,
    Codec,
    Guarantee,
    Kind,
    Parts,
    PayloadMerge,
    State,
    Traits,
    clamp_to,
    expect,
    scale_dtype,
)
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.payload import Payload
from gradwire.core.spec import Spec

_MOST_VOTERS = 2**31 - 1


@dataclass(frozen=True, repr=False)
class SignVote(Codec):
    """Send one bit per element, and receive the majority's."""

    scale: float = 1.0  # magnitude of every element of the result

    paper = (
        "Bernstein et al. 2019, signSGD with majority vote is communication efficient and fault "
        "tolerant"
    )
    examples = ("signvote", "signvote(0.01)")

    algebra = Algebra.MERGE
    leaves = Kind.NOTHING
    parts = ("voters", "votes")

    @property
    def traits(self) -> Traits:
        return Traits(merging=PayloadMerge(_merge, _finalize))

    def __post_init__(self) -> None:
        if not (self.scale > 0 and math.isfinite(self.scale)):
            raise ValueError(
                f"signvote: scale is the magnitude of the result, a positive number; "
                f"got {self.scale}"
            )

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee(grows=True)  # steps of equal size, however large the residual

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        votes = bool((x != 0).any())
        planes = kernels.pack_signs(x) if votes else x.new_empty(0, dtype=torch.uint8)
        return {"voters": _header(int(votes), x.device), "votes": planes}, state

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        voters, planes = _read_votes(parts, -(-spec.numel // 8))
        if voters == 0:
            return parts["votes"].new_zeros(spec.numel, dtype=spec.dtype)
        minus = _at_least(planes, voters // 2 + 1)
        if bool(_at_least(planes, voters + 1).any()):
            raise WireError(f"votes: an element has more than the {voters} there are")
        signs = kernels.unpack_signs(minus, spec.numel, scale_dtype(spec.dtype))
        return clamp_to(signs * self.scale, spec.dtype)


def _merge(a: Payload, b: Payload) -> Payload:
    (voters, planes), (others, more) = _read_votes(a.parts), _read_votes(b.parts)
    if not voters or not others:
        return a if voters else b
    if planes.shape[1] != more.shape[1]:
        raise WireError(
            f"votes: {planes.shape[1]} and {more.shape[1]} bytes a bit plane belong to "
            "different tensors"
        )
    total = voters + others
    if total > _MOST_VOTERS:
        raise WireError(f"voters: {total}, expected at most {_MOST_VOTERS}")
    votes = _add_planes(planes, more, total.bit_length())
    return a.replace(voters=_header(total, votes.device), votes=votes.reshape(-1))


def _finalize(merged: Payload, spec: Spec, size: int) -> Payload:
    """One bit per element: the majority."""
    voters, planes = _read_votes(merged.parts, -(-spec.numel // 8))
    if voters <= 1:
        return merged
    minus = _at_least(planes, voters // 2 + 1)
    return merged.replace(voters=_header(1, minus.device), votes=minus)


def _header(voters: int, device: torch.device) -> Tensor:
    return torch.tensor([voters], dtype=torch.int32, device=device)


def _read_votes(parts: Parts, plane_bytes: int | None = None) -> tuple[int, Tensor]:
    """The number of voters and the bit planes, lowest first: [num_planes, plane_bytes]."""
    voters = int(expect(parts["voters"], "voters", 1, torch.int32))
    if voters < 0:
        raise WireError(f"voters: {voters}, expected 0 .. {_MOST_VOTERS}")
    num_planes, votes = voters.bit_length(), parts["votes"]
    if plane_bytes is None:
        plane_bytes = votes.numel() // max(1, num_planes)
    expect(votes, "votes", num_planes * plane_bytes, torch.uint8)
    return voters, votes.reshape(num_planes, plane_bytes)


def _add_planes(a: Tensor, b: Tensor, num_planes: int) -> Tensor:
    """The sum of numbers in bit planes, by a ripple-carry adder: one step per plane."""
    carry = torch.zeros_like(a[0])
    out = torch.empty(num_planes, a.shape[1], dtype=torch.uint8, device=a.device)
    for i in range(num_planes):
        x = a[i] if i < len(a) else torch.zeros_like(carry)
        y = b[i] if i < len(b) else torch.zeros_like(carry)
        either = x ^ y
        out[i] = either ^ carry
        carry = (x & y) | (either & carry)
    if bool(carry.any()):
        raise WireError("votes: an element has more than there are voters")
    return out


def _at_least(planes: Tensor, threshold: int) -> Tensor:
    """One bit per element, 1 where its number is at least `threshold`: [plane_bytes]."""
    # From the highest bit down: already greater, or equal so far.
    greater = torch.zeros_like(planes[0])
    equal = torch.full_like(greater, 0xFF)
    if threshold.bit_length() > len(planes):
        return greater
    for i in reversed(range(len(planes))):
        if threshold >> i & 1:
            equal = equal & planes[i]
        else:
            greater = greater | (equal & planes[i])
            equal = equal & ~planes[i]
    return greater | equal
