"""Measures the costs of coding on this machine: `gradwire codecs --costs FILE`, about five minutes.

Every codec runs with its examples, at several lengths, on one thread, with other data in the
caches, as after a gradient. Time is the running time of that thread, so other processes count
little. Three numbers are fitted to the median times of each operation (`cost_fit.py`). They are the
entry of the codec. An example for which they are off by more than half has its own entry. The costs
of functions besides codecs are measured in runs (`function_costs.py`).
"""

import contextlib
import json
import os
import subprocess
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

import gradwire
from gradwire import kernels
from gradwire.compression import COMPRESSION
from gradwire.core.codec import Algebra, Codec, merge
from gradwire.core.composite import Composite
from gradwire.core.errors import GradwireWarning
from gradwire.core.fusion import decode_mean, encode_feedback
from gradwire.core.key import Key
from gradwire.core.metering import PACK, UNPACK, VECTOR, Work, metered
from gradwire.core.notation import notation_name
from gradwire.core.payload import Payload
from gradwire.experiment.costs.coding_costs import FILE, FORMAT, read_costs
from gradwire.experiment.costs.cost_fit import Samples, Times, entries, fitted, miss, usual
from gradwire.experiment.costs.function_costs import function_samples
from gradwire.experiment.run.record import Row, write_atomically
from gradwire.experiment.run.threads import use_threads
from gradwire.experiment.studies.codecs import processor, spec_of
from gradwire.runtime.virtual.coding_time import Cost

_LENGTHS = (1 << 10, 1 << 14, 1 << 18, 1 << 21)
_ROUNDS = 2  # over all codecs: a disturbance may last
_REPEATS, _ENOUGH_S = 7, 0.15  # of one example at one length, in one round
_CACHE_NBYTES = 4 << 20  # at least what a core has for itself
_KEY = Key(seed=0).child("coding costs")
_Times = defaultdict[str, defaultdict[str, Times]]  # by codec as it is written, by operation
Progress = Callable[[str, int, int], None]


def write_costs(path: Path, only: Sequence[str], progress: Progress) -> Row:
    """Measures every registered method into a file, and returns what it wrote.

    `only`: these codecs alone. Then the rest stays as it is in the file, or in the one that comes
    with the package if there is none yet.
    """
    with use_threads(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", GradwireWarning)
        if only:
            read_costs(str(path) if path.exists() else "")  # raises if it is damaged
            found = json.loads((path if path.exists() else FILE).read_text())
            fits = measure_codecs(_chosen(only), progress)
            found["codecs"] |= fits.costs
            found["worst"].append(fits.worst)
        else:
            found = measure_all(progress)
    write_atomically(path.absolute(), (_formatted(found) + "\n").encode())
    return found


def _chosen(texts: Sequence[str]) -> dict[str, list[str]]:
    """Codecs by their names, each as it is written."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for text in texts:
        compression = COMPRESSION.parse(text)
        name = notation_name(type(compression))
        if not isinstance(compression, Codec) or isinstance(compression, Composite):
            raise ValueError(
                f"{text}: costs are those of single codecs, and what is made of codecs costs what "
                "they do. Name the codecs in it one by one."
            )
        found[name].append(repr(compression))
    return found


def examples() -> dict[str, list[str]]:
    """How each codec is written, by its name; the first one counts for what is not measured."""
    return {
        notation_name(cls): list(cls.examples) or [notation_name(cls)]
        for cls in sorted(COMPRESSION, key=notation_name)
        if issubclass(cls, Codec)
        and not issubclass(cls, Composite)  # or it costs what the codecs in it do
    }


def measure_all(progress: Progress) -> Row:
    """The table, ready for JSON."""
    others = {name: fitted(points) for name, points in _other_samples().items()}
    codecs = measure_codecs(examples(), progress)
    functions = function_samples(others, progress)
    costs = {name: fitted(points) for name, points in functions.items()}
    return {
        "format": FORMAT,
        "hardware": _hardware(),
        "threads": 1,
        "commit": _commit(),
        "kernels": kernels.backend(),
        "versions": {"gradwire": gradwire.__version__, "torch": torch.__version__},
        # The entries that are off by the largest factors at the greatest length.
        "worst": [
            codecs.worst,
            _worst({n: miss(costs[n], functions[n]) for n in costs if _is_plain(functions[n])}),
        ],
        "others": others,
        "default": _default(codecs.costs),
        "codecs": codecs.costs,
        "functions": costs,
    }


def _is_plain(samples: Samples) -> bool:
    """Whether no codec was in the calls: else little time may be left, and factors mean nothing."""
    return not any(num_reports for num_reports, _ in samples)


class Fits(NamedTuple):
    costs: dict[str, dict[str, Cost]]  # by name or as written, by operation
    worst: Row  # the entry that is off by the largest factor


def measure_codecs(methods: Mapping[str, Sequence[str]], progress: Progress) -> Fits:
    codecs: defaultdict[str, _Times] = defaultdict(_no_times)
    num_done, num_all = 0, _ROUNDS * len(methods)
    for _ in range(_ROUNDS):
        for name, texts in methods.items():
            progress(name, num_done, num_all)
            num_done += 1
            for codec in map(COMPRESSION.parse, texts):
                if isinstance(codec, Codec):
                    _measure_codec(codec, COMPRESSION[name], codecs[name])
    progress("", num_all, num_all)
    costs, misses = dict[str, dict[str, Cost]](), dict[str, float]()
    for name, times in codecs.items():
        samples = {
            text: {operation: usual(points) for operation, points in own.items()}
            for text, own in times.items()
        }
        fits = entries(name, samples)
        costs |= fits
        for text, own in samples.items():
            for operation, points in own.items():
                cost = (fits.get(text) or fits[name])[operation]
                misses[f"{operation} of {text}"] = miss(cost, points)
    return Fits(costs, _worst(misses))


def _worst(misses: Mapping[str, float]) -> Row:
    name = max(misses, key=lambda one: misses[one])
    return {"entry": name, "factor": round(misses[name], 2)}


def _no_times() -> _Times:
    return defaultdict(lambda: defaultdict(lambda: defaultdict(list)))


def _measure_codec(codec: Codec, own: type, times: _Times) -> None:
    """Measures a codec; in a chain, its stages of this class."""
    for numel in _LENGTHS:
        x, residual = (_KEY.child(name).normal(numel) for name in ("x", "residual"))
        spec, key = spec_of("", x), _KEY.private(0)
        state = codec.init(spec)
        try:
            payload, _ = codec.encode(x, state, key)
        except ValueError:  # a budget of bytes that is too small for this length
            continue
        operations: tuple[Callable[[], object], ...] = (
            partial(codec.encode, x, state, key),
            partial(encode_feedback, codec, x, residual, state, key),
            partial(codec.decode, payload, spec, key),
            partial(decode_mean, codec, [payload] * 2, spec, [key] * 2),
            *([partial(merge, codec, payload, payload)] if codec.algebra is Algebra.MERGE else []),
        )
        for work in _repeated(operations):
            if type(work.codec) is own:
                size = work.elements, work.nbytes
                times[repr(work.codec)][work.operation][size].append(work.seconds)


def _repeated(operations: Sequence[Callable[[], object]]) -> Iterator[Work]:
    """What is reported while operations run, in turns; the first time does not count."""
    start = time.thread_time()
    for repeat in range(1 + _REPEATS):
        for operation in operations:
            _fill_caches()
            with metered(time.thread_time) as work:
                operation()
            if repeat:
                yield from work
        if repeat and time.thread_time() - start > _ENOUGH_S:
            return


def _other_samples() -> dict[str, Samples]:
    """Arithmetic on vectors, and checksums."""
    found: dict[str, Samples] = {VECTOR: {}, PACK: {}, UNPACK: {}}
    for numel in _LENGTHS:
        x, y = (_KEY.child(name).normal(numel) for name in ("x", "y"))
        found[VECTOR][0, 3 * x.nbytes] = _usual_s(partial(torch.add, x, y))
        buffer = Payload.pack({"values": x}).buffer
        checked_s = _usual_s(partial(Payload.unpack, buffer, ("values",)))
        for name in (PACK, UNPACK):  # both are a checksum of the whole
            found[name][0, buffer.numel()] = checked_s
    return found


def _usual_s(operation: Callable[[], object]) -> float:
    seconds, start = list[float](), time.thread_time()
    while time.thread_time() - start < _ENOUGH_S or not seconds:
        _fill_caches()
        before = time.thread_time()
        operation()
        seconds.append(time.thread_time() - before)
    return median(seconds)


@lru_cache
def _filler() -> Tensor:
    return torch.ones(_CACHE_NBYTES // 4)


def _fill_caches() -> None:
    _filler().sum()


def _default(codecs: Mapping[str, Mapping[str, Cost]]) -> dict[str, Cost]:
    """The costs for codecs that are not in the table: the upper quartile of those that are."""
    found = {}
    for operation in ("encode", "encode_feedback", "decode"):
        numel = _LENGTHS[-1]
        known = sorted(
            (costs[operation] for costs in codecs.values() if operation in costs),
            key=lambda cost: cost.seconds(numel, numel),
        )
        found[operation] = known[3 * len(known) // 4]
    return found


def _formatted(found: Row) -> str:
    """JSON with one line for each cost, so that files can be compared."""
    marks: dict[str, str] = {}

    def marked(value: Any) -> Any:
        if isinstance(value, Cost):
            marks[f"cost {len(marks)}"] = json.dumps(value)
            return f"cost {len(marks) - 1}"
        return {k: marked(v) for k, v in value.items()} if isinstance(value, dict) else value

    text = json.dumps(marked(found), indent=1)
    for mark, cost in marks.items():
        text = text.replace(f'"{mark}"', cost, 1)
    return text


def _hardware() -> str:
    """The processor and its vector instructions, which matter most for some codecs."""
    flags = ""
    with contextlib.suppress(OSError):
        flags = Path("/proc/cpuinfo").read_text()
    widest = next((f" with {name.upper()}" for name in ("avx512f", "avx2") if name in flags), "")
    return f"{os.cpu_count()}-core {processor()}{widest}"


def _commit() -> str:
    """The commit of the source tree, if this is one."""
    command = ("git", "rev-parse", "--short", "HEAD")
    with contextlib.suppress(OSError):
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
        return found.stdout.strip()
    return ""
