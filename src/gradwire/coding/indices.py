"""A sorted set of indices in the fewest bytes of a bitmap and several codes of its gaps.

The gaps of a random set are geometric, for which Golomb's run-length code (Golomb 1966,
"Run-length encodings") is optimal; Rice's power-of-two parameters (Rice 1979) come within two per
cent at a density of 0.01 (`kernels/reference/gaps.py` says how the bits lie). The gaps of a
clustered set are anything but geometric: Elias' gamma and delta codes (`coding/elias.py`) of the
gaps plus one need no parameter and win there.

    byte 0    0: the bitmap, ceil(universe / 8) bytes, follows
              1 + r: Rice's code follows, ceil(count * r / 8) bytes of low parts, then the quotients
              33: the gaps plus one in the gamma code follow; 34: in the delta code

Universe and count are known to the receiver and not sent. So of no index, or of all of them, no
byte is sent at all.
"""

import math

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.coding._stream import StreamReader
from gradwire.coding.elias import Code, decode_integers
from gradwire.core.errors import WireError

_BITMAP = 0
_MAX_PARAMETER = 31
_ELIAS: dict[int, Code] = {33: "gamma", 34: "delta"}
_ELIAS_UNIVERSE = 2**56 - 1  # the largest of which every gap has an Elias code here


def index_entropy_bits(universe: int, count: int) -> float:
    """log2 of the number of such sets, the least an enumerative code needs (Cover 1973)."""
    nats = math.lgamma(universe + 1) - math.lgamma(count + 1) - math.lgamma(universe - count + 1)
    return nats / math.log(2)


def rice_code(indices: Tensor, universe: int) -> tuple[int, int] | None:
    """Bytes that `encode_indices` returns and Rice's parameter, None if it takes another code. Of
    some indices, but not all."""
    gaps = kernels.measure_gaps(indices, universe)
    size_bytes, mode = min(_sizes(gaps, universe, indices.numel()))
    if mode in _ELIAS or 1 + _ceil8(universe) <= size_bytes:
        return None
    return size_bytes, mode - 1


def encode_indices(indices: Tensor, universe: int) -> Tensor:
    """Strictly increasing int64 indices in 0 .. universe - 1, as uint8 with the mode in front."""
    gaps = kernels.measure_gaps(indices, universe)
    count = len(indices)
    if count in (0, universe):
        return torch.empty(0, dtype=torch.uint8, device=indices.device)
    sizes = _sizes(gaps, universe, count)
    size_bytes, mode = min(sizes)
    if 1 + _ceil8(universe) <= size_bytes:
        return _with_mode(_BITMAP, kernels.pack_ones(indices, universe))
    if mode not in _ELIAS:
        return kernels.encode_rice(indices, mode - 1, gaps.quotients[mode - 1])
    steps = torch.diff(indices, prepend=indices.new_full((1,), -1))
    return _with_mode(mode, kernels.elias_encode(steps, gaps.lengths, _ELIAS[mode] == "delta"))


def decode_indices(packed: Tensor, universe: int, count: int) -> Tensor:
    """The inverse of `encode_indices`, as int64 [count]; other bytes are a WireError."""
    host = kernels.noted(packed, "host")
    if host is not None:  # nothing of it has to be waited for
        return decode_indices(host, universe, count).to(packed.device)
    if packed.dtype != torch.uint8 or packed.dim() != 1:
        raise WireError(f"an index part is uint8 [size], got {packed.dtype} {list(packed.shape)}")
    if not 0 <= count <= universe:
        raise WireError(f"an index part of {universe} elements cannot hold {count} indices")
    if count in (0, universe):
        _expect(not len(packed), "bytes", len(packed), f"none for {count} of {universe} indices")
        return torch.arange(count, device=packed.device)
    if not len(packed):
        raise WireError("an index part starts with a mode byte, got 0 bytes")
    mode, body = int(packed[0]), packed[1:]
    if mode == _BITMAP:
        return _decode_bitmap(body, universe, count)
    if mode in _ELIAS and universe <= _ELIAS_UNIVERSE:
        longest = _ceil8(universe) - 1  # as of Rice's code below
        _expect(len(body) <= longest, "Elias bytes", len(body), f"at most {longest}")
        return _decode_elias(body, _ELIAS[mode], universe, count)
    wrong = _wrong_rice(mode - 1, len(body), universe, count)
    if wrong is not None:
        _expect(False, *wrong)
    try:
        return kernels.decode_rice(body, mode - 1, universe, count)
    except ValueError as error:
        raise WireError(f"an index part has {error}") from None


def scatter_indices(
    packed: Tensor,
    front: int,
    values: Tensor,
    universe: int,
    out: Tensor,
    known: int | None = None,
) -> bool:
    """Writes values to the indices that `encode_indices` coded, from byte `front` on, and zeros
    elsewhere, where `kernels.scatters_entries`. False if `decode_indices` has to be asked: the code
    is another one, or damaged. Then `out` is spoiled. `known` is the parameter of a code of our own
    making, which is not checked."""
    parameter = kernels.scatter_rice(packed, front, values, universe, out, known)
    if parameter is None:
        return False
    if known is not None:
        return True
    return not _wrong_rice(parameter, packed.numel() - front - 1, universe, values.numel())


def _wrong_rice(
    parameter: int, size_bytes: int, universe: int, count: int
) -> tuple[str, int, str] | None:
    """What, which and what else is expected, of bytes that no sender makes."""
    # A code no shorter than the bitmap is never sent, which also bounds what is allocated.
    longest, largest = _ceil8(universe) - 1, _largest_parameter(universe, count)
    if parameter > largest:
        return "as index mode", 1 + parameter, f"0 .. {1 + largest}"
    shortest = _ceil8(count * parameter) + _ceil8(count)  # every quotient takes at least its one
    if not shortest <= size_bytes <= longest:
        return "Rice bytes", size_bytes, f"{shortest} .. {longest}"
    return None


def _decode_bitmap(body: Tensor, universe: int, count: int) -> Tensor:
    _expect(len(body) == _ceil8(universe), "bitmap bytes", len(body), _ceil8(universe))
    _expect(
        universe % 8 == 0 or not int(body[-1]) >> universe % 8,
        f"as last byte of a bitmap of {universe} bits",
        int(body[-1]),
        f"zeros after its first {universe % 8} bits",
    )
    indices = kernels.ones_positions(body, universe)
    _expect(len(indices) == count, "indices in the bitmap", len(indices), count)
    return indices


def _decode_elias(body: Tensor, code: Code, universe: int, count: int) -> Tensor:
    reader = StreamReader(body)
    steps = decode_integers(reader, count, universe, code)
    reader.end()
    # In floating point, since the sum of forged steps could overflow.
    total = float(steps.sum(dtype=torch.float64))
    _expect(total < 2**62, "as sum of gaps", total, f"at most {universe}")
    indices = torch.cumsum(steps, 0) - 1
    last = int(indices[-1])
    _expect(last < universe, "as last index", last, f"at most {universe - 1}")
    # A sender never uses it where another code is as short; so a damaged mode is detected.
    shortest = min(_sizes(kernels.measure_gaps(indices, universe), universe, count))
    _expect(
        _ELIAS.get(shortest[1]) == code,
        f"Elias bytes of the {code} code",
        len(body),
        f"{shortest[0] - 1} bytes of mode {shortest[1]}",
    )
    return indices


def _sizes(gaps: kernels.Gaps, universe: int, count: int) -> list[tuple[int, int]]:
    """The length of each code of the gaps, with its mode."""
    sizes = [
        (1 + _ceil8(count * parameter) + _ceil8(quotients + count), 1 + parameter)
        for parameter, quotients in gaps.quotients.items()
    ]
    if universe <= _ELIAS_UNIVERSE:
        lengths = gaps.lengths[: universe.bit_length()]  # there are no others
        for mode, code in _ELIAS.items():
            sizes.append((1 + sum(kernels.elias_sizes(lengths, code == "delta")), mode))
    return sizes


def _largest_parameter(universe: int, count: int) -> int:
    """The largest parameter in use: the mean gap is at most (universe - count) / count."""
    return min(max((universe - count) // count, 1).bit_length(), _MAX_PARAMETER)


def _with_mode(mode: int, part: Tensor) -> Tensor:
    return torch.cat([part.new_full((1,), mode), part])


def _ceil8(num_bits: int) -> int:
    return -(-num_bits // 8)


def _expect(condition: bool, what: str, given: object, expected: object) -> None:
    if not condition:
        raise WireError(f"an index part has {given} {what}, expected {expected}")
