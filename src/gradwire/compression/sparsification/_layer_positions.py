"""Positions in layers of different densities, with one code for each group of layers.

    ceil((num_layers - 1) / 8) bytes   a bit for each layer but the first: begins a group
    varints                            how many positions there are in each group
    varints                            the lengths of all codes but the last
    codes                              of groups in which some are, but not all

If there are no positions, nothing is sent. Layers are tensors; small ones are joined with the next.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from gradwire.coding.indices import decode_indices, encode_indices
from gradwire.compression._layers import tensors_covering
from gradwire.core.binary import read_varints, write_varints
from gradwire.core.codec import expect
from gradwire.core.errors import WireError
from gradwire.core.spec import Placed, Spec

_MIN_LAYER_NUMEL = 512  # elements

Layers = tuple[tuple[int, int], ...]  # (start, stop) of each


def layers_of(spec: Spec) -> Layers:
    return layers_in(tensors_covering(spec.tensors, spec.numel))


@lru_cache(maxsize=1024)
def layers_in(tensors: tuple[Placed, ...]) -> Layers:
    """Tensors, small ones with those behind them."""
    edges = [0]
    for _, _, stop, _ in tensors:
        if stop - edges[-1] >= _MIN_LAYER_NUMEL:
            edges.append(stop)
    if len(edges) == 1:
        edges.append(tensors[-1][2])
    edges[-1] = tensors[-1][2]
    return tuple(pairwise(edges))


def sizes_of(layers: Layers) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in layers)


def write_positions(
    positions: Tensor, kept: Sequence[int], layers: Layers, firsts: Sequence[int]
) -> tuple[Tensor, list[int]]:
    """Positions as they travel, with one code for each group of layers, and the codes' bytes."""
    groups = _merge_layers(layers, firsts)
    counts = [sum(kept[first:last]) for first, last in pairwise([*firsts, len(layers)])]
    codes = [
        encode_indices(own - start, stop - start)
        for (start, stop), own in zip(groups, positions.split(counts), strict=True)
    ]
    mask = sum(1 << first - 1 for first in firsts[1:]).to_bytes((len(layers) + 6) // 8, "little")
    lengths = [len(code) for code in codes]
    sent = [size for size in lengths if size][:-1]
    head = torch.frombuffer(bytearray(mask + write_varints([*counts, *sent])), dtype=torch.uint8)
    return torch.cat([head.to(positions.device), *codes]), lengths


def read_positions(part: Tensor, layers: Layers) -> tuple[Layers, list[int], list[Tensor]]:
    """Groups of layers with their counts and codes; `WireError` for other bytes.

    The codes themselves are not looked at.
    """
    expect(part, "indices", part.numel(), torch.uint8)
    if not part.numel():
        return layers, [0] * len(layers), [part] * len(layers)
    width = (len(layers) + 6) // 8
    data = bytes(part[: width + 20 * len(layers)].tolist())  # a number has at most nine bytes
    front, mask = len(data), int.from_bytes(data[:width], "little")
    if len(data) < width or mask >> len(layers) - 1:
        raise WireError(f"indices: no groups of {len(layers)} layers")
    groups = _merge_layers(layers, [0, *(i for i in range(1, len(layers)) if mask >> i - 1 & 1)])
    sizes = sizes_of(groups)
    counts, data = read_varints(data[width:], len(groups), max(sizes))
    for count, size in zip(counts, sizes, strict=True):
        if count > size:
            raise WireError(f"indices: {count} positions in layers of {size} elements")
    coded = [0 < count < size for count, size in zip(counts, sizes, strict=True)]
    lengths, data = read_varints(data, max(0, sum(coded) - 1), part.numel())
    front -= len(data)
    rest = part.numel() - front - sum(lengths)
    if rest < 0 or (rest and not any(coded)):
        raise WireError(f"indices: {part.numel()} bytes do not hold the codes of {counts}")
    sent = iter([*lengths, rest])
    codes = part[front:].split([next(sent) if is_coded else 0 for is_coded in coded])
    return groups, counts, list(codes)


def _merge_layers(layers: Layers, firsts: Sequence[int]) -> Layers:
    """Groups of layers, given by the first of each."""
    return tuple(
        (layers[first][0], layers[last - 1][1]) for first, last in pairwise([*firsts, len(layers)])
    )


def all_positions(groups: Layers, counts: Sequence[int], codes: Sequence[Tensor]) -> Tensor:
    found = [
        decode_indices(code, stop - start, count).add_(start)
        for (start, stop), count, code in zip(groups, counts, codes, strict=True)
    ]
    return torch.cat(found)
