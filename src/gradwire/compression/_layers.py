"""Joins the messages of several tensors into one: parts of equal name are concatenated.

One header and checksum per tensor would cost more than a short tensor such as a bias. So the parts
of equal name are concatenated. The codec describes where each tensor's `values` end; for the other
parts the lengths are sent:

    nothing                   in every part all pieces are equally long
    ceil(num_parts / 8) bytes one bit for each part whose pieces are not
    varints                   of each of those the lengths of its pieces, in elements, but the last
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.core.binary import read_varints, write_varints
from gradwire.core.codec import Algebra, Codec, Compression, Kind, Parts, State, as_sent
from gradwire.core.errors import NonFiniteError, WireError
from gradwire.core.fusion import encode_feedback
from gradwire.core.key import Key
from gradwire.core.payload import Payload
from gradwire.core.reducer import Reducer
from gradwire.core.spec import Placed, Spec
from gradwire.core.symbols import packed_bytes

LENGTHS = "lengths"  # the part with the lengths of the pieces
_SYMBOLS = "symbols"  # packed `values` that no other codec can take up


def check_choice(name: str, codec: Compression) -> None:
    """Refuses a compression that cannot encode one tensor among several."""
    if isinstance(codec, Reducer):
        raise ValueError(
            f"{name} encodes tensors, but {codec!r} is a way of averaging. If it wraps a codec, "
            f"put {name} inside: ef({name}(...)). To reduce layers one by one use partition or "
            'sequential("layer").'
        )
    if not isinstance(codec, Codec):
        raise ValueError(f"{name} takes codecs such as topk(0.01), got {codec!r}")
    if codec.traits.takes is not Kind.REAL:
        raise ValueError(
            f"{name}: {codec!r} encodes {codec.traits.takes.value}, so it must follow a quantiser. "
            f"Write {name}(qsgd(bits=4) >> {codec!r})."
        )
    if codec.algebra is Algebra.MERGE:
        raise ValueError(
            f"{name}: the payloads of {codec!r} merge on their way, those of several tensors in "
            'one message cannot. Use it alone, with sequential("layer") for single layers.'
        )
    if codec.traits.statistic is not None:
        raise ValueError(
            f"{name}: what all ranks of {codec!r} share is one number for the whole bucket. "
            'Use it alone, with sequential("layer") for single layers.'
        )


def tensors_covering(tensors: Sequence[Placed] | None, numel: int) -> tuple[Placed, ...]:
    """The tensors if they make up a vector of this length, else the whole vector as one tensor."""
    if tensors and tensors[-1][2] == numel:
        return tuple(tensors)
    return (("", 0, numel, (numel,)),)


@lru_cache(maxsize=1024)
def layer_specs(tensors: tuple[Placed, ...], dtype: torch.dtype) -> tuple[Spec, ...]:
    return tuple(Spec(shape, dtype) for _, _, _, shape in tensors)


def layer_keys(key: Key, tensors: Sequence[Placed]) -> list[Key]:
    """A key for each tensor; one alone has the key of the bucket."""
    return [key] if len(tensors) == 1 else [key.child(name) for name, *_ in tensors]


def split_tensors(x: Tensor, tensors: Sequence[Placed]) -> Iterator[Tensor]:
    """The tensors in a flat vector."""
    return (x[start:stop].reshape(shape) for _, start, stop, shape in tensors)


def part_names(codec: Codec) -> tuple[str, ...]:
    """The parts of the messages of `codec` for several tensors, in wire order."""
    codec = as_sent(codec)
    others = tuple(f"each.{name}" for name in _side_parts(codec))
    values = () if codec.leaves is Kind.NOTHING else (_values_name(codec),)
    return (*((LENGTHS,) if others else ()), *others, *values)


def join_messages(
    codec: Codec, messages: Sequence[Parts], device: torch.device
) -> dict[str, Tensor]:
    """Joins the parts of all messages that `codec.encode` made."""
    codec = as_sent(codec)
    others = _side_parts(codec)
    lengths = [[message[name].numel() for message in messages] for name in others]
    parts = {f"each.{name}": _concatenate([m[name] for m in messages], device) for name in others}
    if others:
        sent = bytearray(_encode_lengths(lengths))
        parts[LENGTHS] = _empty(device)
        if sent:
            parts[LENGTHS] = torch.frombuffer(sent, dtype=torch.uint8).to(device)
    if codec.leaves is not Kind.NOTHING:
        parts[_values_name(codec)] = _concatenate([m["values"] for m in messages], device)
    return parts


def split_messages(codec: Codec, parts: Parts, specs: Sequence[Spec]) -> list[dict[str, Tensor]]:
    """The inverse of `join_messages`, for tensors of these specs. Trusts no part."""
    codec = as_sent(codec)
    messages = _side_information(codec, parts, specs)
    if codec.leaves is Kind.NOTHING:
        return messages
    values = parts[_values_name(codec)]
    sizes = [_wire_size(left) for left in _values_specs(codec, messages, specs)]
    if sum(sizes) != values.numel():
        raise WireError(f"values: {values.numel()}, expected {sum(sizes)} of {len(specs)} tensors")
    return [
        {**message, "values": own}
        for message, own in zip(messages, _split_part(values, sizes), strict=True)
    ]


def values_specs(codec: Codec, parts: Parts, specs: Sequence[Spec]) -> list[Spec]:
    """The specs of each tensor's `values`, for a codec that leaves real numbers."""
    if LENGTHS not in parts:  # before anything is sent: known, or a KeyError
        return _values_specs(codec, [{} for _ in specs], specs)
    return _values_specs(codec, _side_information(codec, parts, specs), specs)


def as_payload(parts: Parts) -> Payload:
    """A payload that `Codec.decode` takes; it was part of another and is no buffer by itself."""
    return Payload(torch.empty(0, dtype=torch.uint8), parts, 0)


def encode_named(name: str, encode: Any, *layer: Any) -> Any:
    """Encodes a tensor; an error about NaN or infinity names the tensor."""
    try:
        return encode(*layer)
    except NonFiniteError as error:
        if not name:
            raise
        raise NonFiniteError(f"{name}: {error}") from None


def encode_layers(
    codecs: Sequence[Codec],
    tensors: tuple[Placed, ...],
    x: Tensor,
    residual: Tensor | None,
    states: Sequence[State],
    key: Key,
) -> tuple[list[Parts], Tensor | None, list[State]]:
    """Each tensor of a flat vector with its codec: messages, what is lost, and the new states."""
    messages, after, whole = [], [], FlatVectorBuilder(tensors)
    vectors = [x] if residual is None else [x, residual]
    cut = zip(*(split_tensors(vector, tensors) for vector in vectors), strict=True)
    layers = zip(codecs, tensors, cut, states, layer_keys(key, tensors), strict=True)
    for codec, (name, *_), own, state, own_key in layers:
        if residual is None:
            payload, new = encode_named(name, codec.encode, *own, state, own_key)
        else:
            payload, lost, new = encode_named(name, encode_feedback, codec, *own, state, own_key)
            whole.add(lost)
        messages.append(payload.parts)
        after.append(new)
    return messages, None if residual is None else whole.vector, after


class FlatVectorBuilder:
    """Builds a flat vector from its tensors. Each is copied at once, while it is in the cache."""

    def __init__(self, tensors: tuple[Placed, ...]) -> None:
        self._places = iter(tensors)
        self._numel = tensors[-1][2]
        self._vector: Tensor | None = None

    def add(self, tensor: Tensor) -> None:
        _, start, stop, _ = next(self._places)
        if stop - start == self._numel and self._vector is None:
            self._vector = tensor.reshape(-1)
            return
        if self._vector is None:
            on_cpu = tensor.device.type == "cpu"
            self._vector = (
                kernels.empty(self._numel, tensor.dtype)
                if on_cpu
                else tensor.new_empty(self._numel)
            )
        self._vector[start:stop] = tensor.reshape(-1)

    @property
    def vector(self) -> Tensor:
        assert self._vector is not None
        return self._vector


def _side_information(codec: Codec, parts: Parts, specs: Sequence[Spec]) -> list[dict[str, Tensor]]:
    others = _side_parts(codec)
    if not others:
        return [{} for _ in specs]
    lengths = parts[LENGTHS]
    if lengths.dtype != torch.uint8:
        raise WireError(f"lengths: {lengths.dtype}, expected bytes")
    own = [parts[f"each.{name}"] for name in others]
    # A longer one is refused before it becomes Python numbers: no length takes ten bytes.
    if lengths.numel() > len(others) * (1 + 9 * len(specs)):
        raise WireError(f"lengths: {lengths.numel()} bytes for {len(specs)} tensors")
    table = _decode_lengths(bytes(lengths.tolist()), [part.numel() for part in own], len(specs))
    columns = [_split_part(part, sizes) for part, sizes in zip(own, table, strict=True)]
    return [dict(zip(others, row, strict=True)) for row in zip(*columns, strict=True)]


def _values_specs(codec: Codec, messages: Sequence[Parts], specs: Sequence[Spec]) -> list[Spec]:
    return [codec.values_spec(spec.flat(), own) for spec, own in zip(specs, messages, strict=True)]


def _wire_size(left: Spec) -> int:
    """Of `values` on the wire, in elements."""
    return left.numel if left.alphabet is None else packed_bytes(left.numel, left.alphabet)


def _side_parts(codec: Codec) -> tuple[str, ...]:
    return tuple(name for name in codec.parts if name != "values")


def _values_name(codec: Codec) -> str:
    return "values" if codec.leaves is Kind.REAL else _SYMBOLS


def _split_part(part: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    return part.split(list(sizes)) if sizes else ()


def _concatenate(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    if not parts:
        return _empty(device)
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _empty(device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device)


def _encode_lengths(lengths: Sequence[Sequence[int]]) -> bytes:
    """[part][tensor] as bytes; the receiver knows the sum for each part."""
    sent = [len(set(row)) > 1 for row in lengths]
    if not any(sent):
        return b""
    mask = sum(1 << i for i, is_sent in enumerate(sent) if is_sent)
    numbers = [size for row, is_sent in zip(lengths, sent) if is_sent for size in row[:-1]]
    return mask.to_bytes(-(-len(lengths) // 8), "little") + write_varints(numbers)


def _decode_lengths(data: bytes, totals: Sequence[int], num_tensors: int) -> list[list[int]]:
    width = -(-len(totals) // 8) if data else 0
    mask, data = int.from_bytes(data[:width], "little"), data[width:]
    table = []
    for i, total in enumerate(totals):
        if mask >> i & 1 and num_tensors:
            sizes, data = read_varints(data, num_tensors - 1, total)
            sizes.append(total - sum(sizes))
        else:
            sizes = [total // num_tensors] * num_tensors if num_tensors else []
        if sum(sizes) != total or (sizes and sizes[-1] < 0):
            raise WireError(f"lengths: {total} elements cannot be those of {num_tensors} tensors")
        table.append(sizes)
    if data or mask >> len(totals):
        raise WireError("lengths: more bytes than there are parts and tensors")
    return table
