"""A tree of plain values and tensors, as a description in JSON and a list of tensors.

So a state goes to other ranks and into checkpoints without pickling: `described` takes the tensors
out, `rebuilt` puts them back.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_PLAIN = (bool, int, float, str, type(None))

NextTensor = Callable[[list[int], torch.dtype, bool], Tensor]


def described(value: Any, tensors: list[Tensor], what: str) -> Any:
    """Plain values for JSON; tensors are appended to the list. `what` names the whole in errors."""
    if isinstance(value, Tensor):
        tensors.append(value)
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": [list(value.shape), dtype, value.device.type == "cpu"]}
    if isinstance(value, Mapping) and all(isinstance(key, _PLAIN) for key in value):
        return {"map": [[key, described(own, tensors, what)] for key, own in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [described(own, tensors, what) for own in value]}
    if isinstance(value, _PLAIN):
        return {"value": value}
    raise ValueError(
        f"{what} has {value!r}, which is neither a tensor nor a plain value: save or load it on "
        "every rank instead"
    )


def rebuilt(row: Any, next_tensor: NextTensor) -> Any:
    """The tree. `next_tensor` gets the shape, the dtype, and whether it was on the CPU."""
    ((kind, value),) = row.items()
    if kind == "tensor":
        shape, dtype, was_on_cpu = value
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"a tensor of the unknown dtype {dtype!r}")
        return next_tensor(shape, found, was_on_cpu)
    if kind == "map":
        return {key: rebuilt(item, next_tensor) for key, item in value}
    if kind in ("list", "tuple"):
        items = [rebuilt(item, next_tensor) for item in value]
        return items if kind == "list" else tuple(items)
    return value


def as_tensors(value: Any, what: str) -> tuple[Tensor, ...]:
    """The description as bytes, then the tensors of the tree."""
    tensors: list[Tensor] = []
    text = json.dumps(described(value, tensors, what))
    return (torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8), *tensors)


def from_tensors(saved: Sequence[Tensor], device: torch.device, what: str) -> Any:
    """What `as_tensors` was given. Tensors that were on an accelerator go to the device."""
    try:
        head, *tensors = saved
        row = json.loads(bytes(head.cpu().numpy()))
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{what} is not what state_dict() returned: {error}") from None
    left = iter(tensors)

    def next_tensor(shape: list[int], dtype: torch.dtype, was_on_cpu: bool) -> Tensor:
        tensor = next(left, None)
        if tensor is None or list(tensor.shape) != shape or tensor.dtype is not dtype:
            found = "none" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{what} is damaged: a tensor is {found}, expected {dtype} {shape}")
        return tensor if was_on_cpu else tensor.to(device)

    return rebuilt(row, next_tensor)
