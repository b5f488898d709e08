"""In step t every worker sends to the one 2^(t mod ceil(log2 n)) ranks further on.

W_t[i + 2^(t mod k), i] = W_t[i, i] = 1/2, k = ceil(log2 n): one message per worker and step. If n
is a power of two, the product of any k matrices in a row is the exact mean (Ying et al. 2021,
lemma 1). There i receives from i + 2^k, the mirror image.
"""

from dataclasses import dataclass

from torch import Tensor

from gradwire.architecture.graphs._graph import Graph
from gradwire.architecture.graphs.exponential import Exponential, circulant


@dataclass(frozen=True, repr=False)
class OnePeerExponential(Graph):
    """Send to the one 1, then 2, then 4, ... ranks further on: one message in each step."""

    paper = Exponential.paper
    examples = ("one_peer_exponential",)

    @property
    def directed(self) -> bool:
        return True

    @property
    def varies(self) -> bool:
        return True

    def period(self, size: int) -> int:
        return max(1, (size - 1).bit_length())

    def weights(self, size: int, step: int) -> Tensor:
        return circulant(size, [1 << step])
