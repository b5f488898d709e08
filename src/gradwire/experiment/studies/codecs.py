"""Bits, error and speed of each codec on vectors of three kinds, in one table.

Every registered codec is measured as its first example writes it, and a few chains, on a Gaussian
vector, a Laplacian one and gradients saved from training. Bits are read off the packed payload.
Times are the best of a few on one thread, compared with a memcpy of the same vector at the same
moment, because GB/s alone describe the machine as much as the codec. Reducers, which are no codecs,
are run by four virtual workers on their own gradients.
"""

import contextlib
import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from rich import box
from rich.table import Table
from torch import Tensor

import gradwire
from gradwire import kernels
from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.compression import COMPRESSION
from gradwire.core.codec import Codec, Compression, Kind
from gradwire.core.fusion import encode_feedback
from gradwire.core.key import Key
from gradwire.core.node import Node
from gradwire.core.notation import notation_name
from gradwire.core.payload import Payload
from gradwire.core.reducer import Reducer
from gradwire.core.spec import Spec
from gradwire.experiment.run.record import Row
from gradwire.experiment.run.threads import use_threads
from gradwire.experiment.studies.defaults import CODECS_NUMEL as NUMEL
from gradwire.experiment.studies.gradients import (
    facts,
    saved_facts,
    saved_gradients,
    worker_gradients,
)
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.engine import VirtualEngine

_MAX_NUMEL = 1 << 28  # a gigabyte; some codecs need twenty times that while they run
CHAINS = (
    "topk(0.01) >> fp16",
    "topk(0.01) >> qsgd(bits=4)",
    "topk(0.01) >> sign",
    "randomk(0.01) >> fp16",
)
STEPS = 8  # of a method with memory, whose effect shows only after some steps
REAL = "real"  # the row that sums up all saved gradients
_KEY = Key(seed=0).child("gradwire codecs")
_REPEATS, _ENOUGH_S = 5, 0.5


def methods() -> list[str]:
    """How every codec and reducer is written: codecs by family, chains, then reducers."""
    # Coders of symbols come last: their examples are chains.
    classes = sorted(
        COMPRESSION, key=lambda cls: (getattr(cls, "takes", None) is Kind.SYMBOLS, cls.__module__)
    )
    first = [(cls.examples or (notation_name(cls),))[0] for cls in classes]
    codecs = [text for text in first if isinstance(COMPRESSION.parse(text), Codec)]
    return [*codecs, *CHAINS, *(text for text in first if text not in codecs)]


def chosen(only: Sequence[str]) -> list[Compression]:
    """What to measure: all, or these; a bare name stands for its first example."""
    texts = only or methods()
    written = [
        (COMPRESSION[text].examples or (text,))[0] if text in COMPRESSION else text
        for text in texts
    ]
    return [COMPRESSION.parse(text) for text in dict.fromkeys(written)]


def inputs(numel: int = NUMEL) -> dict[str, Tensor]:
    """The vectors by name: two drawn ones, then the saved gradients."""
    if not 1 <= numel <= _MAX_NUMEL:
        raise ValueError(f"numel must lie in 1 .. {_MAX_NUMEL}, got {numel}")
    uniform = _KEY.child("laplacian").uniform64(numel) - 0.5
    laplacian = -uniform.sign() * torch.log1p(-2 * uniform.abs())
    return {
        "gaussian": _KEY.child("gaussian").normal(numel),
        "laplacian": laplacian.float(),
        **saved_gradients(),
    }


def measure(
    only: Sequence[str] = (),
    numel: int = NUMEL,
    progress: Callable[[str, int, int], None] = lambda method, done, total: None,
) -> Row:
    """All figures, ready for JSON. `progress` gets each method, how many are done, of how many."""
    compressions = chosen(only)
    rows: dict[str, list[Row]] = {"codecs": [], "reducers": []}
    with use_threads(1):
        vectors = inputs(numel)
        for done, compression in enumerate(compressions):
            progress(repr(compression), done, len(compressions))
            if isinstance(compression, Codec):
                rows["codecs"] += measure_codec(compression, vectors)
            else:
                assert isinstance(compression, Reducer)
                rows["reducers"].append(measure_reducer(compression, worker_gradients()))
        progress("", len(compressions), len(compressions))
    return {
        "numel": numel,
        "inputs": {name: facts(x) for name, x in vectors.items()},
        **rows,
        "kernels": kernels.backend(),
        "processor": processor(),
        "versions": {"gradwire": gradwire.__version__, "torch": torch.__version__},
    }


def processor() -> str:
    """The name of the processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def measure_codec(codec: Codec, vectors: dict[str, Tensor]) -> list[Row]:
    """One row per vector, and one that sums up the saved gradients."""
    rows = [_measure(codec, name, x) for name, x in vectors.items()]
    saved = [row for row in rows if row["input"] not in ("gaussian", "laplacian")]
    return [*rows, _total(saved)] if saved else rows


def _measure(codec: Codec, name: str, x: Tensor) -> Row:
    spec, key, copy = spec_of(name, x), _KEY.private(0), torch.empty_like(x)
    state = codec.init(spec)
    if codec.traits.needs_feedback:  # it sends in some steps what it kept back in others
        payloads, decoded = _fed_back(codec, x, spec, key)
    else:
        payloads = [codec.encode(x, state, key)[0]]
        decoded = codec.decode(payloads[0], spec, key)
    encode_s, decode_s, memcpy_s = _best_s(
        lambda: codec.encode(x, state, key),
        lambda: codec.decode(payloads[-1], spec, key),
        lambda: copy.copy_(x),
    )
    return {
        "method": repr(codec),
        "input": name,
        "numel": x.numel(),
        "bits": 8 * sum(payload.nbytes for payload in payloads) / len(payloads) / x.numel(),
        "nmse": nmse(decoded, x),
        "cosine": cosine(decoded, x),
        "encode_s": encode_s,
        "decode_s": decode_s,
        "memcpy_s": memcpy_s,
        **_speeds(x.numel(), encode_s, decode_s, memcpy_s),
    }


def _fed_back(codec: Codec, x: Tensor, spec: Spec, key: Key) -> tuple[list[Payload], Tensor]:
    """The payloads of several steps with the same gradient, and the mean of what they decode to."""
    state, residual = codec.init(spec), torch.zeros_like(x)
    payloads, decoded = [], torch.zeros_like(x)
    for step in range(STEPS):
        payload, residual, state = encode_feedback(codec, x, residual, state, key.at(step))
        payloads.append(payload)
        decoded += codec.decode(payload, spec, key.at(step)) / STEPS
    return payloads, decoded


def spec_of(name: str, x: Tensor) -> Spec:
    """Of an input, with the layers in it; a drawn vector counts as one nearly square matrix."""
    saved = saved_facts().get(name)
    shapes = saved["layers"] if saved else {"": _nearly_square(x.numel())}
    tensors, start = [], 0
    for layer, shape in shapes.items():
        stop = start + math.prod(shape)
        tensors.append((layer, start, stop, tuple(shape)))
        start = stop
    return Spec(tuple(x.shape), x.dtype, tensors=tuple(tensors))


def _nearly_square(numel: int) -> tuple[int, int]:
    rows = next(rows for rows in range(math.isqrt(numel), 0, -1) if numel % rows == 0)
    return rows, numel // rows


def _total(rows: Sequence[Row]) -> Row:
    """Bits and times of all together; errors averaged, each vector counting the same."""
    numel = sum(row["numel"] for row in rows)
    times = {name: sum(row[name] for row in rows) for name in ("encode_s", "decode_s", "memcpy_s")}
    return {
        "method": rows[0]["method"],
        "input": REAL,
        "numel": numel,
        "bits": sum(row["bits"] * row["numel"] for row in rows) / numel,
        "nmse": sum(row["nmse"] for row in rows) / len(rows),
        "cosine": sum(row["cosine"] for row in rows) / len(rows),
        **times,
        **_speeds(numel, *times.values()),
    }


def _speeds(numel: int, encode_s: float, decode_s: float, memcpy_s: float) -> Row:
    """GB/s are of float32 elements; `_copies` is the time over that of a memcpy."""
    return {
        "encode_gb_per_s": 4e-9 * numel / encode_s,
        "decode_gb_per_s": 4e-9 * numel / decode_s,
        "encode_copies": encode_s / memcpy_s,
        "decode_copies": decode_s / memcpy_s,
    }


def _best_s(*operations: Callable[[], object]) -> list[float]:
    """The fastest, least disturbed, run of each; they take turns."""
    best = [math.inf] * len(operations)
    start = time.perf_counter()
    for _ in range(_REPEATS):
        for i, operation in enumerate(operations):
            before = time.perf_counter()
            operation()
            best[i] = min(best[i], time.perf_counter() - before)
        if time.perf_counter() - start > _ENOUGH_S:
            break
    return best


def nmse(decoded: Tensor, x: Tensor) -> float:
    """|C(x) - x|^2 / |x|^2."""
    exact = x.double()
    return float((decoded.double() - exact).square().sum() / exact.square().sum())


def cosine(decoded: Tensor, x: Tensor) -> float:
    """Of the angle between C(x) and x; 0 if C(x) = 0."""
    a, b = decoded.double().reshape(-1), x.double().reshape(-1)
    norms = a.norm() * b.norm()
    return float(a @ b / norms) if norms > 0 else 0.0


def measure_reducer(reducer: Reducer, gradients: Tensor) -> Row:
    """Workers average the same gradients [num_workers, ...] for some steps.

    The error after one step is that of the mean. The error after all is that of the sum of what
    was applied, which is where feedback shows.
    """
    size, spec = len(gradients), Spec.of(gradients[0])

    async def program(node: Node) -> list[Tensor]:
        means, state = [], reducer.init(spec, size)
        for step in range(STEPS):
            group = AllReduce().group(node, "gradient")
            key = _KEY.at(step).private(node.rank)
            reduced = await reducer.mean(gradients[node.rank], state, key, group)
            state = reduced.state
            means.append(reduced.mean)
        return means

    engine = VirtualEngine(Network.uniform(size))
    means = engine.run([program] * size)[0]
    exact = gradients.double().mean(dim=0)
    applied = torch.stack(means).double().sum(dim=0)
    moves = reducer.momentum_lives == "inside"  # its result is not meant to be the mean
    return {
        "method": repr(reducer),
        "workers": size,
        "numel": spec.numel,
        "steps": STEPS,
        "bits": 8 * engine.ledger.total_bytes / (size * STEPS * spec.numel),
        "nmse_first": None if moves else nmse(means[0], exact),
        "nmse_all": None if moves else nmse(applied, STEPS * exact),
        "cosine_all": cosine(applied, exact),
    }


def codecs_tables(measured: Row) -> Iterator[Table]:
    """What the terminal shows, within 80 columns: one table per kind of input, then reducers."""
    names = {
        "gaussian": f"Gaussian, {measured['numel']:,} elements",
        "laplacian": f"Laplacian, {measured['numel']:,} elements",
        REAL: f"{len(measured['inputs']) - 2} gradients saved from training",
    }
    for kind, title in names.items():
        rows = [row for row in measured["codecs"] if row["input"] == kind]
        if rows:
            yield _codec_table(title, rows)
    if measured["reducers"]:
        yield _reducer_table(measured["reducers"])


def _table(title: str, method: str, columns: Iterable[str]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        header_style="bold",
        pad_edge=False,
        padding=0,
    )
    table.add_column(method, overflow="fold", min_width=20)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _codec_table(title: str, rows: Sequence[Row]) -> Table:
    columns = (
        "bits per\nelement",
        "NMSE",
        "cosine",
        "encode\nGB/s",
        "decode\nGB/s",
        "encode\n/copy",
        "decode\n/copy",
    )
    table = _table(title, "method", columns)
    for row in rows:
        table.add_row(row["method"], *formatted(row))
    return table


def formatted(row: Row) -> list[str]:
    """The figures of a codec's row, as tables show them."""
    return [
        _short(row["bits"]),
        f"{row['nmse']:.2g}",
        f"{row['cosine']:.4f}",
        *(_short(row[f"{side}_gb_per_s"]) for side in ("encode", "decode")),
        *(_short(row[f"{side}_copies"]) for side in ("encode", "decode")),
    ]


def _reducer_table(rows: Sequence[Row]) -> Table:
    first = rows[0]
    table = _table(
        f"Reducers: {first['workers']} workers average a gradient of {first['numel']:,} elements",
        "method",
        ("bits per element,\nworker and step", "NMSE,\n1 step", f"NMSE,\n{STEPS} steps", "cosine"),
    )
    for row in rows:
        table.add_row(row["method"], *formatted_reducer(row))
    return table


def formatted_reducer(row: Row) -> list[str]:
    """The figures of a reducer's row, as tables show them."""
    errors = (
        "-" if row[name] is None else f"{row[name]:.2g}" for name in ("nmse_first", "nmse_all")
    )
    return [_short(row["bits"]), *errors, f"{row['cosine_all']:.4f}"]


def _short(value: float) -> str:
    """Three digits, never an exponent for what tables hold."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"
