import torch

from gradwire.kernels.reference import huffman
from kernels.triton_cases import Case


def cases():
    for count in (1, 2, 100, 2048 + 60):
        yield Case(
            "huffman", "huffman_decode", str(count), lambda count=count: _code(count), count == 100
        )


def _code(count):
    generator = torch.Generator().manual_seed(count)
    symbols = torch.randn(count, generator=generator).mul(3).round().int().clamp(-8, 8) + 8
    counts = torch.bincount(symbols, minlength=17) + torch.tensor([1, 1, *[0] * 15])
    lengths = huffman.huffman_lengths(counts)
    num_bits = int(lengths[symbols.long()].sum())
    return huffman.huffman_encode(symbols, lengths, num_bits), lengths, count
