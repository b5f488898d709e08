"""Checksums that are computed on the device: the bytes and the errors of the host's.

Interpreted kernels stand for a device, and tensors of the CPU for its memory.
"""

import zlib

import pytest
import torch

from gradwire import kernels
from gradwire.compression import COMPRESSION
from gradwire.core import payload as payload_module
from gradwire.core import payload_header
from gradwire.core.codec import Codec, unpack
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.payload import Payload
from gradwire.core.spec import Spec

pytest.importorskip("triton", reason="Triton is not installed")

PARTS = {
    "scale": torch.arange(1.0, 4.0),
    "wide": torch.arange(100, dtype=torch.int64),
    "values": torch.arange(2000, dtype=torch.int32).to(torch.uint8),
}


@pytest.fixture
def there(monkeypatch):
    """Payloads of any size are treated as if an accelerator had them; the lengths it was asked
    about."""
    asked = []

    def crc32(x, start=0, crc=0, head=0):
        asked.append(x.numel())
        return triton.crc32(x, start, crc, head)

    from gradwire.kernels.triton import checksum as triton

    monkeypatch.setenv("GRADWIRE_KERNELS", "triton")
    monkeypatch.setattr(kernels, "crc32", crc32)
    for module in (payload_module, payload_header):
        monkeypatch.setattr(module, "checked_there", lambda buffer: True)
    return asked


@pytest.mark.parametrize("names", [("values",), ("scale", "values"), ("values", "wide", "scale")])
def test_the_bytes_are_those_of_the_host(names, there, monkeypatch):
    parts = {name: PARTS[name] for name in names}
    payload = Payload.pack(parts, 99)
    found = payload.buffer.clone()
    assert there == [len(found)]
    with monkeypatch.context() as host:
        host.setattr(payload_module, "checked_there", lambda buffer: False)
        assert torch.equal(found, Payload.pack(parts, 99).buffer)
    received = Payload.unpack(found, names, 99)
    assert there == [len(found)] * 2
    for name in names:
        assert torch.equal(received.parts[name], PARTS[name])


def test_parts_among_the_first_bytes_are_known_on_the_host(there):
    buffer = Payload.pack(PARTS).buffer.clone()
    scale = {"scale": PARTS["scale"], "values": PARTS["values"]}
    received = Payload.unpack(Payload.pack(scale).buffer.clone(), tuple(scale))
    assert torch.equal(kernels.noted(received.parts["scale"], "host"), PARTS["scale"])
    assert kernels.noted(received.parts["values"], "host") is None
    behind = Payload.unpack(buffer, tuple(PARTS))  # 800 bytes of `wide` come first
    assert kernels.noted(behind.parts["scale"], "host") is None


@pytest.mark.parametrize(
    ("position", "value", "reason"),
    [
        (0, 0x58, "not a gradwire payload"),
        (1, 2, "version 2"),
        (2, 9, "9 parts, expected 3"),
        (3, 1, "not a gradwire payload"),
        (4, None, "checksum"),
        (8, 9, "dtype code 9"),
        (9, 4, "header describes"),
        (15, None, "checksum"),  # padding
        (20, None, "checksum"),
        (-1, None, "checksum"),
    ],
)
def test_damage_is_refused_in_the_same_words(position, value, reason, there, monkeypatch):
    buffer = Payload.pack(PARTS).buffer.clone()
    buffer[position] = int(buffer[position]) ^ 0xFF if value is None else value
    with pytest.raises(WireError, match=reason) as found:
        Payload.unpack(buffer, tuple(PARTS))
    monkeypatch.setattr(payload_module, "checked_there", lambda buffer: False)
    with pytest.raises(WireError) as expected:
        Payload.unpack(buffer, tuple(PARTS))
    assert str(found.value) == str(expected.value)


def test_one_bit_counts_wherever_it_is(there):
    buffer = Payload.pack({"values": PARTS["values"][:30]}, 5).buffer.clone()
    for bit in range(5, 8 * len(buffer), 61):
        damaged = buffer.clone()
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            Payload.unpack(damaged, ("values",), 5)
    with pytest.raises(WireError, match="another codec or tensor"):
        Payload.unpack(buffer, ("values",), 6)


@pytest.mark.parametrize("text", ["sign", "sign(bucket=64)", "qsgd(bits=4)", "topk(0.1)", "fp16"])
def test_codecs_read_what_they_wrote(text, there):
    codec, x = COMPRESSION.parse(text), Key(1).normal(3000)
    assert isinstance(codec, Codec)
    spec = Spec.of(x)
    payload, _ = codec.encode(x, codec.init(spec), Key(2))
    received = unpack(codec, payload.buffer.clone(), spec)
    assert len(there) == 2
    decoded = [codec.decode(each, spec, Key(2)) for each in (payload, received)]
    assert torch.equal(*decoded)


@pytest.mark.parametrize("offset", [1, 4, 6])
def test_memory_may_start_anywhere(offset, monkeypatch):
    monkeypatch.setenv("GRADWIRE_KERNELS", "triton")
    memory = torch.randint(256, (5000,), dtype=torch.uint8, generator=torch.Generator())
    x = memory[offset:]
    assert kernels.crc32(x, 3, 7, 10) == (zlib.crc32(bytes(x.tolist()[3:]), 7), bytes(x[:10]))


@pytest.mark.parametrize("numel", [100_001, pytest.param(1 << 20, marks=pytest.mark.slow)])
def test_many_tiles(numel, monkeypatch):
    monkeypatch.setenv("GRADWIRE_KERNELS", "triton")
    x = torch.randint(256, (numel,), dtype=torch.uint8, generator=torch.Generator())
    assert kernels.crc32(x, 8)[0] == zlib.crc32(x[8:].numpy())


def test_what_has_no_checksum_is_refused():
    with pytest.raises(ValueError, match="contiguous vector of uint8"):
        kernels.crc32(torch.zeros(4))
    with pytest.raises(ValueError, match="byte 5 of 4"):
        kernels.crc32(torch.zeros(4, dtype=torch.uint8), 5)


def test_on_the_cpu_and_for_few_bytes_the_host_computes():
    assert not kernels.checks_there(torch.device("cpu"))
    assert not payload_header.checked_there(torch.zeros(100, dtype=torch.uint8))
