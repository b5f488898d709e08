"""Fingerprints of a user's own module and data, as records have them.

Equal fingerprints mean the same structure and the same initial values, or data of the same type
and length with the same few examples. They are for mistakes, not against malice.
"""

import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gradwire.core.tree import leaves_of

_NUM_BYTES = 6
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


class _Digest(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...


def fingerprint_module(module: nn.Module) -> str:
    """Of its layers with their settings, and of all parameters and buffers."""
    digest = blake2b(digest_size=_NUM_BYTES)
    for name, layer in module.named_modules():
        _add(digest, f"{name}: {type(layer).__qualname__}({_without_address(layer.extra_repr())})")
    for name, parameter in module.named_parameters():
        _add(digest, f"{name} {parameter.requires_grad}")
        _add_tensor(digest, parameter)
    for name, buffer in module.named_buffers():
        _add(digest, name)
        _add_tensor(digest, buffer)
    return digest.hexdigest()


def fingerprint_data(kind: str, lengths: Sequence[int], examples: Sequence[Any]) -> str:
    """Of the type of the data, the lengths of its parts, and some examples."""
    digest = blake2b(digest_size=_NUM_BYTES)
    _add(digest, f"{kind} {list(lengths)}")
    for example in examples:
        for leaf in leaves_of(example):
            if isinstance(leaf, Tensor):
                _add_tensor(digest, leaf)
            elif hasattr(leaf, "tobytes"):  # numpy arrays, images
                _add(digest, type(leaf).__name__)
                digest.update(leaf.tobytes())
            else:
                _add(digest, _without_address(repr(leaf)))
    return digest.hexdigest()


def _add(digest: _Digest, text: str) -> None:
    digest.update(f"{text}\n".encode())


def _add_tensor(digest: _Digest, tensor: Tensor) -> None:
    _add(digest, f"{tuple(tensor.shape)} {tensor.dtype}")
    if tensor.layout is torch.strided and tensor.device.type != "meta":
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _without_address(text: str) -> str:
    return _ADDRESS.sub("", text)
