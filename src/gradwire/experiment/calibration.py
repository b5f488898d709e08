"""Measures what coding costs here: `gradwire codecs --costs FILE`, a few minutes.

Every codec runs as its examples write it, at several lengths, on one thread. Time is what that
thread ran for, so that other processes count little. Three numbers are fitted to the fastest times
of each of its operations:

    seconds = fixed + per_element * elements + per_byte * bytes

They stand under its name. An example that they miss by more than half has an entry of its own, as
it is written. Functions of methods that are no codecs, and the optimizers' update, are measured in
the same way, by the bytes that they read and write.
"""

import contextlib
import json
import math
import os
import subprocess
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gradwire
from gradwire import kernels
from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.compression import COMPRESSION
from gradwire.core.codec import Codec
from gradwire.core.errors import GradwireWarning
from gradwire.core.key import Key
from gradwire.core.metering import MERGE, PACK, UNPACK, VECTOR, Work, metered
from gradwire.core.node import Call, Node
from gradwire.core.notation import notation_name
from gradwire.core.payload import Payload
from gradwire.core.reducer import Reducer
from gradwire.core.spec import Spec
from gradwire.experiment.codecs import processor, spec_of
from gradwire.experiment.coding_costs import FORMAT
from gradwire.experiment.record import Row, write_atomically
from gradwire.experiment.setup import OPTIMIZERS
from gradwire.experiment.threads import use_threads
from gradwire.runtime.coding_time import (
    CodingTime,
    Cost,
    function_name,
    own_nbytes,
    touched_nbytes,
)
from gradwire.runtime.network import Network
from gradwire.runtime.virtual import VirtualEngine
from gradwire.training.optimizer import clipped_update

_LENGTHS = (1 << 10, 1 << 14, 1 << 18)
_ROUNDS = 3
_REPEATS, _ENOUGH_S = 9, 0.25  # of one example at one length, in one round
_MISS = 1.5  # from which factor on an example has an entry of its own
_NUM_WORKERS, _STEPS = 3, 2  # that run methods which are no codecs
_DIGITS = 3
_BYTES_EXPLAIN = 0.7  # of the squared error that is left without them, at most
_KEY = Key(seed=0).child("coding costs")
Samples = dict[tuple[int, int], float]  # elements and bytes -> the fastest time
_Samples = defaultdict[str, defaultdict[str, Samples]]  # by codec as it is written, by operation
Progress = Callable[[str, int, int], None]


def write_costs(path: Path, also: Sequence[str], progress: Progress) -> None:
    """Measures every registered method, and `also` these codecs, into a file."""
    with use_threads(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", GradwireWarning)
        found = measure_costs(examples(also), progress)
    write_atomically(path.absolute(), (_formatted(found) + "\n").encode())


def examples(also: Sequence[str]) -> dict[str, list[str]]:
    """How each method is written, by its name; the first one counts for what is not measured."""
    found: dict[str, list[str]] = {}
    for cls in sorted(COMPRESSION, key=notation_name):
        found[notation_name(cls)] = list(cls.examples) or [notation_name(cls)]
    for text in also:
        compression = COMPRESSION.parse(text)
        name = notation_name(type(compression))
        if name not in found:
            raise ValueError(
                f"{text}: costs are those of single codecs, and a chain costs what its stages do. "
                "Name the stages one by one."
            )
        found[name].append(repr(compression))
    return found


def measure_costs(methods: Mapping[str, Sequence[str]], progress: Progress) -> Row:
    """The table, ready for JSON. All are measured in several rounds: a disturbance may last."""
    codecs: dict[str, _Samples] = {}
    functions: dict[str, Samples] = {}
    others: dict[str, Samples] = {VECTOR: {}, PACK: {}, UNPACK: {}}
    num_done, num_all = 0, _ROUNDS * len(methods)
    for _ in range(_ROUNDS):
        _measure_others(others)
        _measure_updates(functions)
        for name, texts in methods.items():
            progress(name, num_done, num_all)
            num_done += 1
            own = COMPRESSION[name]
            if issubclass(own, Codec) and own.is_composite:
                continue  # it costs what the codecs in it do
            for method in map(COMPRESSION.parse, texts):
                if not issubclass(own, Codec):
                    assert isinstance(method, Reducer)
                    _measure_reducer(method, functions)
                elif isinstance(method, Codec):
                    samples = codecs.setdefault(name, defaultdict(lambda: defaultdict(dict)))
                    _measure_codec(method, own, samples)
    progress("", num_all, num_all)
    costs: dict[str, dict[str, Cost]] = {}
    for name, samples in codecs.items():
        costs |= entries(name, samples)
    return {
        "format": FORMAT,
        "hardware": _hardware(),
        "threads": 1,
        "commit": _commit(),
        "kernels": kernels.backend(),
        "versions": {"gradwire": gradwire.__version__, "torch": torch.__version__},
        "others": {name: fitted(points) for name, points in others.items()},
        "default": _default(costs),
        "codecs": costs,
        "functions": {name: fitted(points) for name, points in sorted(functions.items())},
    }


def _measure_codec(codec: Codec, own: type, samples: _Samples) -> None:
    """Of a codec; of a chain those of its stages of this class."""
    for numel in _LENGTHS:
        x, residual = (_KEY.child(name).normal(numel) for name in ("x", "residual"))
        spec, key = spec_of("", x), _KEY.private(0)
        state = codec.init(spec)
        try:
            payload, _ = codec.encode(x, state, key)
        except ValueError:  # a budget of bytes that is too small for this length
            continue
        operations = (
            partial(codec.encode, x, state, key),
            partial(codec.encode_feedback, x, residual, state, key),
            partial(codec.decode, payload, spec, key),
            partial(codec.decode_mean, [payload] * 2, spec, [key] * 2),
        )
        for work in _repeated(operations):
            if type(work.codec) is own and work.operation != MERGE:
                points = samples[repr(work.codec)][work.operation]
                _keep(points, (work.elements, work.nbytes), work.seconds)


def _repeated(operations: Sequence[Callable[[], object]]) -> Iterator[Work]:
    """What is reported while operations run, in turns; the first time does not count."""
    start = time.perf_counter()
    for repeat in range(1 + _REPEATS):
        for operation in operations:
            with metered(time.thread_time) as work:
                operation()
            if repeat:
                yield from work
        if repeat and time.perf_counter() - start > _ENOUGH_S:
            return


def entries(name: str, samples: Mapping[str, Mapping[str, Samples]]) -> dict[str, dict[str, Cost]]:
    """The entry of a codec, and those of examples that do not fit it; none if nothing reported.

    The first example always counts, each of the others if all so far can be described together.
    """
    fits: dict[str, Cost] = {}
    together: list[Mapping[str, Samples]] = []
    own: dict[str, dict[str, Cost]] = {}
    for text, samples_of in samples.items():
        joint = _fitted_together([*together, samples_of])
        if not together or all(_miss(joint, one) <= _MISS for one in (*together, samples_of)):
            fits, together = joint, [*together, samples_of]
        else:
            own[text] = _fitted_together([samples_of])
    return {name: fits, **own} if fits else {}


def _fitted_together(several: Sequence[Mapping[str, Samples]]) -> dict[str, Cost]:
    pooled: defaultdict[str, Samples] = defaultdict(dict)
    for own in several:
        for operation, points in own.items():
            pooled[operation] |= points
    return {operation: fitted(pooled[operation]) for operation in sorted(pooled)}


def _miss(fits: Mapping[str, Cost], samples: Mapping[str, Samples]) -> float:
    """By what factor a cost is off at the greatest length, at worst over the operations."""
    worst = 1.0
    for operation, points in samples.items():
        size, seconds = max(points.items())
        ratio = fits[operation].seconds(*size) / seconds if operation in fits else math.inf
        worst = max(worst, ratio, 1 / ratio if ratio else math.inf)
    return worst


@dataclass
class _Recorder(CodingTime):
    """Charges nothing, and keeps what calls without codecs took."""

    functions: defaultdict[str, Samples] = field(default_factory=lambda: defaultdict(dict))

    meters = True

    def seconds(self, call: Call[Any], result: Any, work: Sequence[Work], taken_s: float) -> float:
        nbytes = own_nbytes(call, result, work)
        name = function_name(call.function)
        if nbytes is not None and name.startswith("compression."):
            _keep(self.functions[name], (0, nbytes), taken_s)
        return 0.0


def _measure_reducer(reducer: Reducer, functions: dict[str, Samples]) -> None:
    """Some workers average vectors; what the method's own functions take is kept."""
    recorder = _Recorder()
    for numel in _LENGTHS:
        xs = [_KEY.private(rank).normal(numel) for rank in range(_NUM_WORKERS)]
        program = partial(_average, reducer, xs, spec_of("", xs[0]))
        start = time.perf_counter()
        for _ in range(_REPEATS):
            engine = VirtualEngine(Network.uniform(_NUM_WORKERS), coding=recorder)
            engine.run([program] * _NUM_WORKERS)
            if time.perf_counter() - start > _ENOUGH_S:
                break
    for name, samples in recorder.functions.items():
        for size, seconds in samples.items():
            _keep(functions.setdefault(name, {}), size, seconds)


async def _average(reducer: Reducer, xs: Sequence[Tensor], spec: Spec, node: Node) -> None:
    state = reducer.init(spec, node.size)
    for step in range(_STEPS):
        key = _KEY.at(step).private(node.rank)
        group = AllReduce().group(node, "x")
        state = (await reducer.mean(xs[node.rank], state, key, group)).state


def _measure_updates(functions: dict[str, Samples]) -> None:
    samples = functions.setdefault(function_name(clipped_update), {})
    for text in ("sgd(0.1)", "sgd(0.1, momentum=0.9)", "adam"):
        rule = OPTIMIZERS.parse(text)
        for numel in _LENGTHS:
            params, gradient = (_KEY.child(name).normal(numel) for name in ("x", "gradient"))
            args = (rule, None, 0.1, params, gradient, rule.init(params))
            nbytes = touched_nbytes(args, clipped_update(*args))
            assert nbytes is not None
            _keep(samples, (0, nbytes), _fastest(partial(clipped_update, *args)))


def _measure_others(others: dict[str, Samples]) -> None:
    """Arithmetic on vectors, and checksums."""
    for numel in _LENGTHS:
        x, y = (_KEY.child(name).normal(numel) for name in ("x", "y"))
        _keep(others[VECTOR], (0, 3 * x.nbytes), _fastest(partial(torch.add, x, y)))
        buffer = Payload.pack({"values": x}).buffer
        checked_s = _fastest(partial(Payload.unpack, buffer, ("values",)))
        for name in (PACK, UNPACK):  # both are a checksum of the whole
            _keep(others[name], (0, buffer.numel()), checked_s)


def _fastest(operation: Callable[[], object]) -> float:
    best, start = math.inf, time.perf_counter()
    for _ in range(20 * _REPEATS):
        before = time.thread_time()
        operation()
        best = min(best, time.thread_time() - before)
        if time.perf_counter() - start > _ENOUGH_S:
            break
    return best


def _keep(samples: Samples, size: tuple[int, int], seconds: float) -> None:
    samples[size] = min(seconds, samples.get(size, math.inf))


def fitted(samples: Samples) -> Cost:
    """The costs, none below zero, with the least relative error.

    Of most codecs bytes are a multiple of elements, and either would do. So bytes count only if
    they explain what elements do not.
    """
    sizes = torch.tensor([(1, *size) for size in samples], dtype=torch.float64)  # [m, 3]
    seconds = torch.tensor(list(samples.values()), dtype=torch.float64)
    rows = sizes / seconds[:, None]  # what they add up to should be 1
    varied = bool(sizes[:, 2].max() > 2 * sizes[:, 2].min())  # or else they are a constant
    best, least = Cost(0.0, 0.0, 0.0), math.inf
    for columns in ((0,), (1,), (0, 1), (2,), (0, 2), (1, 2), (0, 1, 2)):
        chosen = rows[:, columns]
        scale = chosen.amax(dim=0)
        if not bool((scale > 0).all()) or (2 in columns and not varied):
            continue
        ones = torch.ones(len(rows), 1, dtype=torch.float64)
        numbers = torch.linalg.lstsq(chosen / scale, ones).solution[:, 0] / scale
        if bool((numbers < 0).any()) or not bool(torch.isfinite(numbers).all()):
            continue
        error = float((chosen @ numbers - 1).square().sum())
        if error < least * (_BYTES_EXPLAIN if 2 in columns else 1.0):
            three = dict(zip(columns, numbers.tolist()))
            best = Cost(*(float(f"{three.get(i, 0.0):.{_DIGITS}g}") for i in range(3)))
            least = error
    return best


def _default(codecs: Mapping[str, Mapping[str, Cost]]) -> dict[str, Cost]:
    """For codecs that are not in the table: three quarters of those that are take less."""
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
    """The processor and what its vectors are: for some codecs that is most of the difference."""
    flags = ""
    with contextlib.suppress(OSError):
        flags = Path("/proc/cpuinfo").read_text()
    widest = next((f" with {name.upper()}" for name in ("avx512f", "avx2") if name in flags), "")
    return f"{os.cpu_count()}-core {processor()}{widest}"


def _commit() -> str:
    """Of the source tree, if this is one."""
    command = ("git", "rev-parse", "--short", "HEAD")
    with contextlib.suppress(OSError):
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
        return found.stdout.strip()
    return ""
