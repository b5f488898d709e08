"""Which entropy coder of symbols: our own or a library's?

2^22 symbols of two quantisers on a Gaussian vector, 15 levels in wide use and three of which
nearly all are zero, coded on one thread: bits per symbol against their order-0 entropy, and GB/s
of the float32 tensor they stand for, best of several. Libraries that are not installed are left
out:

    pip install --target libraries constriction zstandard
    PYTHONPATH=libraries python benchmarks/entropy_coders.py

Answer: our own rANS. It takes 1.002 of the entropy of 3.20 bits and 1.003 of 0.255 bits, tables
included, encodes at 0.9 to 1.7 GB/s and decodes at 1.7 to 3.2 (AVX-512; the load of the machine
makes the difference). `golomb` takes 1.007 of the 0.255 bits and decodes them at 7 GB/s.

- constriction 0.5 (ANS and range coder): 1.000 of the entropy without a table (its model is built
  from floats, which sender and receiver must agree on to the bit); encodes as fast, decodes 6 to 10
  times slower. It says nothing about most damage: of a truncated or flipped code it decodes other
  symbols, so the checks would be ours to add.
- zstandard 0.25 on packed symbols is the fastest by far (8 GB/s, 12 GB/s; its Huffman coder sees
  two 4-bit symbols at a time) and takes 1.009 of 3.20 bits, but 1.54 of 0.255 bits: whole bits per
  byte do not reach low entropies, which is where entropy coding pays. It checks what it reads, but
  allocates what the frame's header says unless told otherwise, and runs on no other device.
- zlib: 1.04 and 1.77 of the entropy, slower than rANS on the first.

`huffman` and `elias` are here because the papers use them: in C they encode at 0.6 to 1.3 GB/s, and
decode at 1.9 to 3.7 (`huffman`) and 0.4 to 1.0 (`elias`), measured on top of commit 273ab35. All
others: AMD EPYC with AVX-512, 2 cores shared with other work, gcc 12, torch 2.13, memcpy at 17 to
19 GB/s; on top of commit a9caec3.
"""

import importlib
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gradwire.coding.elias import decode_elias, encode_elias
from gradwire.coding.golomb import decode_golomb, encode_golomb
from gradwire.coding.huffman import decode_huffman, encode_huffman
from gradwire.coding.rans import decode_rans, encode_rans
from gradwire.compression.quantization.qsgd import QSGD
from gradwire.core.key import Key
from gradwire.core.symbols import pack_symbols, unpack_symbols

COUNT = 2**22
SOURCES = (QSGD(bits=4), QSGD(1, norm="l2"))
Coder = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], int]]


def best_s(operation: Callable[[], Any], repeats: int = 5) -> tuple[float, Any]:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = operation()
        times.append(time.perf_counter() - start)
    return min(times), result


def own(symbols: torch.Tensor, alphabet: int) -> dict[str, Coder]:
    pairs = {
        "fixed width": (pack_symbols, unpack_symbols),
        "rans": (encode_rans, decode_rans),
        "huffman": (encode_huffman, decode_huffman),
        "elias gamma": (
            lambda x, m: encode_elias(x, m, "gamma"),
            lambda p, n, m: decode_elias(p, n, m, "gamma"),
        ),
        "golomb": (encode_golomb, decode_golomb),
    }
    return {
        name: (
            lambda encode=encode: encode(symbols, alphabet),
            lambda packed, decode=decode: decode(packed, COUNT, alphabet),
            torch.Tensor.numel,
        )
        for name, (encode, decode) in pairs.items()
    }


def general(symbols: torch.Tensor, alphabet: int) -> dict[str, Coder]:
    """Compressors of bytes, given packed symbols and one symbol per byte."""
    coders: dict[str, Coder] = {}
    packed = pack_symbols(symbols, alphabet).numpy().tobytes()
    singles = symbols.to(torch.uint8).numpy().tobytes()
    for label, data in (("packed", packed), ("bytes", singles)):
        coders[f"zlib 1, {label}"] = (
            lambda data=data: zlib.compress(data, 1),
            zlib.decompress,
            len,
        )
        zstandard = optional("zstandard")
        if zstandard:
            coders[f"zstd 1, {label}"] = (
                lambda data=data, z=zstandard: z.ZstdCompressor(level=1).compress(data),
                lambda packed, z=zstandard: z.ZstdDecompressor().decompress(packed),
                len,
            )
    return coders


def from_constriction(symbols: torch.Tensor, alphabet: int) -> dict[str, Coder]:
    constriction = optional("constriction")
    if not constriction:
        return {}
    stream = constriction.stream
    data = symbols.numpy()
    counts = torch.bincount(symbols, minlength=alphabet).numpy().astype(np.float32)
    model = stream.model.Categorical(counts / counts.sum(), perfect=False)

    def ans_encode() -> Any:
        coder = stream.stack.AnsCoder()
        coder.encode_reverse(data, model)
        return coder.get_compressed()

    def range_encode() -> Any:
        coder = stream.queue.RangeEncoder()
        coder.encode(data, model)
        return coder.get_compressed()

    def nbytes(packed: Any) -> int:
        return int(packed.nbytes)

    return {
        "constriction ANS": (
            ans_encode,
            lambda packed: stream.stack.AnsCoder(packed).decode(model, COUNT),
            nbytes,
        ),
        "constriction range": (
            range_encode,
            lambda packed: stream.queue.RangeDecoder(packed).decode(model, COUNT),
            nbytes,
        ),
    }


def optional(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        print(f"{name} is not installed: left out")
        return None


def main() -> None:
    torch.set_num_threads(1)
    x = Key(1).normal(COUNT)
    size_gb = 4 * COUNT / 1e9
    copy = torch.empty_like(x)
    memcpy_s, _ = best_s(lambda: copy.copy_(x), 10)
    print(f"memcpy {size_gb / memcpy_s:.1f} GB/s")
    for source in SOURCES:
        symbols, alphabet = source.split(x, None, Key(0))[0]["values"], 2 * source.num_levels + 1
        p = torch.bincount(symbols).double() / COUNT
        entropy = float(-(p * p.log2()).nansum())
        print(f"\n{source!r}: entropy {entropy:.3f} bits/symbol")
        coders = {
            **own(symbols, alphabet),
            **from_constriction(symbols, alphabet),
            **general(symbols, alphabet),
        }
        for name, (encode, decode, size) in coders.items():
            encode_s, packed = best_s(encode)
            decode_s, _ = best_s(lambda decode=decode, packed=packed: decode(packed))
            bits = 8 * size(packed) / COUNT
            print(
                f"{name:20} {bits:6.3f} bits  {bits / entropy:5.3f} of entropy   "
                f"encode {size_gb / encode_s:6.2f}   decode {size_gb / decode_s:6.2f} GB/s"
            )


if __name__ == "__main__":
    main()
