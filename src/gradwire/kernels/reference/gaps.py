"""Rice's code (Rice 1979) of the gaps of a sorted set, low parts and quotients apart.

A gap is the number of elements left out before an index. It is split into its low r bits and a
quotient in unary, q zeros and a one:

    a byte: 1 + r; all low parts, r bits each; all quotients as one bit stream

So both directions are vector operations: the ones of the stream are at q_0, q_0 + 1 + q_1, ...,
and differences give the quotients back.
"""

import torch
from torch import Tensor

from gradwire.kernels.reference.bits import ones_positions, pack_ones, pack_uints, unpack_uints

LARGEST_PARAMETER = 31  # low parts are unpacked as int32; mean gaps beyond 2^32 are rare


def not_increasing_error(indices: Tensor, universe: int) -> ValueError:
    return ValueError(
        f"indices must be strictly increasing in 0 .. {universe - 1}, got {len(indices)} from "
        f"{int(indices.min())} to {int(indices.max())}"
    )


def quotients_error(quotients: int) -> ValueError:
    return ValueError(f"encode_rice: the quotients do not add up to {quotients}")


def measure_gaps(indices: Tensor, universe: int) -> tuple[int, list[int], list[int]]:
    """The parameter r at log2 of the mean gap; the sums of gap >> r' for the r' from r - 1 on (or
    from 0 on), three of them; how many gaps plus one have 1, 2, .. 64 bits."""
    count = len(indices)
    if not count:
        return 0, [0] * 3, [0] * 64
    last = int(indices[-1])
    is_increasing = not bool((indices[1:] <= indices[:-1]).any())
    if int(indices[0]) < 0 or last >= universe or not is_increasing:
        raise not_increasing_error(indices, universe)
    gaps = _gaps(indices)
    middle = min(max((last + 1 - count) // count, 1).bit_length() - 1, LARGEST_PARAMETER)
    first = max(middle - 1, 0)
    sums = [int((gaps >> parameter).sum()) for parameter in range(first, first + 3)]
    return middle, sums, torch.bincount(bit_lengths(gaps + 1), minlength=64).tolist()


def encode_rice(indices: Tensor, parameter: int, quotients: int) -> Tensor:
    gaps = _gaps(indices)
    ones = torch.cumsum((gaps >> parameter) + 1, 0) - 1
    if len(ones) and int(ones[-1]) + 1 != len(ones) + quotients:
        raise quotients_error(quotients)
    parts = [torch.full((1,), 1 + parameter, dtype=torch.uint8, device=indices.device)]
    if parameter:
        parts.append(pack_uints(gaps & ((1 << parameter) - 1), parameter))
    return torch.cat([*parts, pack_ones(ones, len(ones) + quotients)])


def decode_rice(body: Tensor, parameter: int, universe: int, count: int) -> Tensor:
    num_low = -(-count * parameter // 8)
    low, stream = body[:num_low], body[num_low:]
    ones = ones_positions(stream, 8 * len(stream))
    if len(ones) != count:
        raise ValueError(f"{len(ones)} quotients, expected {count}")
    used = (int(ones[-1]) + 8) // 8 if count else 0
    if used != len(stream):
        raise ValueError(f"{len(stream)} bytes of quotients, expected {used}")
    if not count:
        return ones
    # The quotients alone must fit, or the shift below could overflow.
    total, most = int(ones[-1]) + 1 - count, (universe - 1) >> parameter
    if total > most:
        raise ValueError(f"{total} as sum of quotients, expected at most {most}")
    gaps = (torch.diff(ones, prepend=ones.new_full((1,), -1)) - 1) << parameter
    if parameter:
        expect_zero_padding(low, count * parameter)
        gaps |= unpack_uints(low, parameter, count)
    indices = torch.cumsum(gaps + 1, 0) - 1
    if int(indices[-1]) >= universe:
        raise ValueError(f"{int(indices[-1])} as last index, expected at most {universe - 1}")
    return indices


def write_entries(
    words: Tensor,
    code_at: int,
    indices: Tensor,
    parameter: int,
    lead: bytes,
    values: Tensor,
    values_at: int,
) -> bool:
    quotients = int((_gaps(indices) >> parameter).sum())
    code = encode_rice(indices, parameter, quotients)[1:]
    front = torch.tensor(list(lead), dtype=torch.uint8, device=code.device)
    code = torch.cat([front, code])
    words.view(torch.uint8)[4 * code_at :][: len(code)] = code
    words[values_at : values_at + len(values)] = values.view(torch.int32)
    return True


def scatter_rice(
    packed: Tensor,
    front: int,
    values: Tensor,
    universe: int,
    out: Tensor,
    known: int | None = None,
) -> int | None:
    parameter, body = int(packed[front]) - 1, packed[front + 1 :]
    if not 0 <= parameter <= LARGEST_PARAMETER or len(body) * 8 <= len(values) * parameter:
        return None
    try:
        indices = decode_rice(body, parameter, universe, len(values))
    except ValueError:
        return None
    out.zero_().scatter_(0, indices, values)
    return parameter


def expect_zero_padding(packed: Tensor, num_bits: int) -> None:
    """Refuses bytes with ones behind the last of `num_bits` bits: no sender makes them."""
    if num_bits % 8 and int(packed[-1]) >> num_bits % 8:
        raise ValueError(
            f"a stream of bits that ends in byte {int(packed[-1])}, expected zeros after "
            f"its first {num_bits % 8} bits"
        )


def bit_lengths(values: Tensor) -> Tensor:
    """floor(log2 v) of positive int64, by halving what is left to be found."""
    length, rest = torch.zeros_like(values), values
    for step in (32, 16, 8, 4, 2, 1):
        is_long = rest >= 1 << step
        length = torch.where(is_long, length + step, length)
        rest = torch.where(is_long, rest >> step, rest)
    return length


def _gaps(indices: Tensor) -> Tensor:
    return torch.diff(indices, prepend=indices.new_full((1,), -1)) - 1
