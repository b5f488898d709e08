"""How fast does the polar coder turn bits into fewer bits and back?

Source bits per second on one thread at N = 1024, R = 0.5, best of several: `kernel` is successive
cancellation (or the transform) on 64 blocks side by side, `compressor` the whole of
PolarCompressor.compress and decompress, from bytes of zero and one to packed bits and back. Next to
them the code of the thesis, py-polar-codes, in the same run on a few blocks (its Bhattacharyya
construction at 0 dB), and how many times as fast we are:

    pip install 'gradwire[benchmark]'
    python benchmarks/polar.py

Then the codec `polar`, in elements of a Gaussian vector per second.

Answer: 2.5 to 3.0 Gbit/s encode and 10.0 to 10.7 Gbit/s decode; successive cancellation by itself
4.0 to 4.4 Gbit/s, float ratios 0.5 to 1.1, a list of eight 10 to 20 Mbit/s. py-polar-codes encodes
at 0.03 to 0.05 Mbit/s and decodes at 0.3 to 0.9: 56,000 to 110,000 and 10,000 to 37,000 times
slower. The codec encodes 0.8 to 1.05 G elements per second at 0.5 bits, the most at 2^20 elements,
on a machine that was busy otherwise. See README.md for hardware and commit.
"""

import argparse
import importlib
import time
from typing import Any

import numpy as np
import torch

from gradwire import kernels
from gradwire.coding.polar import PolarCompressor, free_positions
from gradwire.coding.polar.channel import bsc_ratio, distortion_bound
from gradwire.compression import COMPRESSION
from gradwire.core.codec import Codec
from gradwire.core.key import Key
from gradwire.core.spec import Spec
from timing import best_s


def random_bits(blocks: int, n: int) -> torch.Tensor:
    return (Key(1).words(blocks * n) & 1).to(torch.uint8).view(blocks, n)


def measure(n: int, k: int, blocks: int) -> dict[str, float]:
    """Bits per second of each step."""
    bits = random_bits(blocks, n)
    lanes = kernels.bits_to_lanes(bits)
    kinds = kernels.polar_kinds(free_positions(n, k))
    magnitude = bsc_ratio(distortion_bound(k / n))
    compressor = PolarCompressor(n, k)
    packed = compressor.compress(bits)
    listing = PolarCompressor(n, k, list_size=8)
    some = bits[: min(blocks, 512)]
    llr = (1 - 2 * bits.to(torch.float32)) * 2.0
    rows = {
        "kernel: successive cancellation": (
            lambda: kernels.polar_quantise_bits(lanes, magnitude, kinds),
            bits,
        ),
        "kernel: transform": (lambda: kernels.polar_transform(lanes), bits),
        "compressor: encode": (lambda: compressor.compress(bits), bits),
        "compressor: decode": (lambda: compressor.decompress(packed), bits),
        "compressor: decode, packed": (lambda: compressor.decompress_packed(packed), bits),
        "compressor: encode, float ratios": (lambda: compressor.compress_llr(llr), bits),
        "compressor: encode, list of 8": (lambda: listing.compress(some), some),
    }
    speeds = {}
    for name, (operation, source) in rows.items():
        seconds = best_s(operation, 3 if "list" in name else 15)
        speeds[name] = source.numel() / seconds
    return speeds


def measure_codec(text: str, numel: int) -> tuple[float, float]:
    """Elements per second of a codec, encoding and decoding a Gaussian vector."""
    codec, x, key = COMPRESSION.parse(text), Key(2).normal(numel), Key(3)
    assert isinstance(codec, Codec)
    payload, _ = codec.encode(x, None, key)
    encode_s = best_s(lambda: codec.encode(x, None, key), 8)
    return numel / encode_s, numel / best_s(lambda: codec.decode(payload, Spec.of(x), key), 8)


def thesis(n: int, k: int, blocks: int) -> tuple[float, float, float] | str:
    """Bits per second of py-polar-codes, encoding and decoding, and its distortion; or why not."""
    try:
        codes: Any = importlib.import_module("polarcodes")
    except ImportError as error:
        return f"py-polar-codes is left out: {error}; pip install 'gradwire[benchmark]'"
    bits = random_bits(blocks, n).numpy()
    code = codes.PolarCode(n, k)
    code.construction_type = "bb"
    codes.Construct(code, 0.0)
    start = time.perf_counter()
    sent = []
    for block in bits:
        code.likelihoods = 2.0 * (1 - 2.0 * block)
        codes.Decode(code)
        sent.append(code.message_received)
    encoded = time.perf_counter()
    heard = []
    for message in sent:
        code.set_message(message)
        codes.Encode(code)
        heard.append(np.array(code.u))
    done = time.perf_counter()
    wrong = float((np.stack(heard) != bits).mean())
    return bits.size / (encoded - start), bits.size / (done - encoded), wrong


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--blocks", type=int, default=4096)
    parser.add_argument("--their-blocks", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    n, k = arguments.n, round(arguments.rate * arguments.n)
    print(f"{kernels.backend()} kernels, N = {n}, K = {k}, {arguments.blocks} blocks, one thread")
    theirs = thesis(n, k, arguments.their_blocks)
    if isinstance(theirs, str):
        print(theirs)
    else:
        print(f"{'py-polar-codes: encode':34} {theirs[0] / 1e6:10.4f} Mbit/s, D {theirs[2]:.4f}")
        print(f"{'py-polar-codes: decode':34} {theirs[1] / 1e6:10.4f} Mbit/s")
    for name, speed in measure(n, k, arguments.blocks).items():
        ratio = ""
        if not isinstance(theirs, str):
            decodes = "decode" in name or "transform" in name
            ratio = f"{speed / theirs[1 if decodes else 0]:12,.0f} x py-polar-codes"
        print(f"{name:34} {speed / 1e6:10.1f} Mbit/s {ratio}")
    for text in (f"polar({arguments.rate}, block={n})", "polar(1.0)", "polar(2.0)"):
        encode, decode = measure_codec(text, 1 << 22)
        print(f"{text:34} {encode / 1e6:10.1f} M elements/s encode, {decode / 1e6:.1f} decode")


if __name__ == "__main__":
    main()
