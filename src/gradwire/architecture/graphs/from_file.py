"""A mixing matrix read from a file: `from_file("weights.csv")`.

A text file has one row per line, with numbers or fractions such as 1/3 separated by commas or
spaces; `#` begins a comment. A `.npy` file holds a two-dimensional array of real numbers. Row i
holds the weights that rank i gives to ranks 0 .. n - 1. Rows and columns must sum to one within
1e-6; what is missing then, as in 0.3333333 for 1/3, is made up by scaling rows and columns
(Sinkhorn 1964), so that the mean does not drift. For `sgp` it is enough that the columns do.

A matrix whose powers do not tend to the mean (unconnected workers, or partners that only swap)
is refused.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tokenize import TokenError

import numpy as np
import torch
from torch import Tensor

from gradwire.architecture.graphs._graph import (
    Graph,
    check_column_stochastic,
    is_doubly_stochastic,
)

_MOST = 64 * 2**20  # bytes: more than any number of workers needs


@dataclass(frozen=True, repr=False)
class FromFile(Graph):
    """A matrix of weights from a text or .npy file: row i has the weights of rank i."""

    path: str

    examples = ('from_file("weights.csv")',)

    @property
    def directed(self) -> bool:
        weights = self._read()
        return not torch.equal(weights, weights.T)

    def weights(self, size: int, step: int) -> Tensor:
        return self.matrix(size)

    def matrix(self, size: int, step: int = 0) -> Tensor:
        # Not kept by size like other graphs: the file may have changed.
        weights = self._read()
        if len(weights) != size:
            raise ValueError(
                f"{self!r} is a matrix for {len(weights)} workers, but there are {size}. "
                f"Set workers to {len(weights)} or give another file."
            )
        return weights

    def _read(self) -> Tensor:
        path = Path(self.path)
        if not path.is_file():
            raise ValueError(f"{self!r}: there is no such file. Give the path of a matrix.")
        state = path.stat()
        if state.st_size > _MOST:
            raise ValueError(f"{self!r}: {state.st_size} bytes, at most {_MOST} are read")
        return _read(path.absolute(), repr(self), state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=8)
def _read(path: Path, what: str, changed_ns: int, num_bytes: int) -> Tensor:
    weights = _array(path, what) if path.suffix == ".npy" else _text(path, what)
    check_column_stochastic(weights, what)
    balanced = is_doubly_stochastic(weights)
    symmetric = bool(((weights - weights.T).abs() < 1e-9).all())
    for _ in range(100):
        rows, columns = weights.sum(dim=1), weights.sum(dim=0)
        if max((rows - 1).abs().max(), (columns - 1).abs().max()) < 1e-13:
            break
        scale = torch.sqrt(rows[:, None] * columns[None, :]) if balanced else columns[None, :]
        weights = weights / scale
    if symmetric:  # but for rounding
        weights = (weights + weights.T) / 2
    sizes = torch.linalg.eigvals(weights).abs().sort().values
    if len(sizes) > 1 and sizes[-2] > 1 - 1e-9:
        raise ValueError(
            f"{what}: workers would never agree, the second largest eigenvalue is "
            f"{sizes[-2].item():.6g}. Connect all of them, and give some a weight on themselves."
        )
    return weights


def _array(path: Path, what: str) -> Tensor:
    try:
        # Mapped, a header that promises more than the file holds is noticed before it costs memory.
        array = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, OSError, SyntaxError, OverflowError, TokenError) as error:
        raise ValueError(f"{what} is not an array of numbers: {error}") from None
    if array.ndim != 2 or array.dtype.kind not in "fiu" or not array.size:
        raise ValueError(
            f"{what}: expected real numbers of shape [n, n], got {array.dtype} "
            f"of shape {list(array.shape)}"
        )
    return torch.from_numpy(array.astype(np.float64))


def _text(path: Path, what: str) -> Tensor:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{what} is not text. Arrays are read from names in .npy.") from None
    rows: list[list[float]] = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].replace(",", " ").split()
        if not words:
            continue
        try:
            rows.append([_number(word) for word in words])
        except (ValueError, ZeroDivisionError):
            raise ValueError(
                f"{what}: line {number} is not a row of numbers: {line.strip()[:60]!r}"
            ) from None
        if len(rows[-1]) != len(rows[0]):
            raise ValueError(
                f"{what}: line {number} has {len(rows[-1])} numbers, the first row {len(rows[0])}"
            )
    if not rows:
        raise ValueError(f"{what} has no rows. Write one line of weights per worker.")
    return torch.tensor(rows, dtype=torch.float64)


def _number(word: str) -> float:
    above, slash, below = word.partition("/")
    return float(above) / float(below) if slash else float(word)
