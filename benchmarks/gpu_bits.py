"""The part `bits` of gpu_codecs.py: what a codec makes on CUDA against what it makes on the CPU."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.compression import COMPRESSION
from gradwire.core.codec import Codec, Kind, unpack
from gradwire.core.fusion import encode_feedback
from gradwire.core.key import Key
from gradwire.core.notation import notation_name
from gradwire.core.spec import Spec

KEY = Key(seed=1, step=3).private(0)
CUDA = torch.device("cuda")
WHAT = ("payload", "decoded", "payload with feedback", "residual")
# Their sums are left to a library of the device, as docs/architecture.md says: products of
# matrices, and singular vectors.
ROUNDING = {"dctk", "atomo"}
GRACE_S = 90.0  # for the case that is under way when the time is up
MOST_ROUNDED = 2.0**-8  # of the largest element decoded; what differs by more is an error
# Torch adds float64 up in an order of its own: scales of float64 tensors differ in the last bits.
MOST_ROUNDED_FLOAT64 = 2.0**-48


class Case(NamedTuple):
    text: str
    name: str
    x: Tensor
    residual: Tensor


@dataclass
class Found:
    """What was compared. Of `rounded` expressions the largest relative difference is kept."""

    equal: int = 0
    not_reached: int = 0
    different: dict[str, list[str]] = field(default_factory=dict)
    rounded: dict[str, float] = field(default_factory=dict)

    def add(self, other: "Found") -> None:
        self.equal += other.equal
        self.not_reached += other.not_reached
        for text, differences in other.different.items():
            self.different.setdefault(text, []).extend(differences)
        for text, relative in other.rounded.items():
            self.rounded[text] = max(relative, self.rounded.get(text, 0.0))

    def show(self, listed: bool) -> None:
        """In two lines; `listed`: with all differences, where nobody has shown them yet."""
        for text, differences in self.different.items() if listed else ():
            print(f"DIFFERS {text}:", *differences, sep="\n    ")
        for text, relative in self.rounded.items() if listed else ():
            show_rounded(text, relative)
        largest = max(self.rounded.values(), default=0.0)
        wrong = len(self.different)
        print(
            f"bits: {self.equal} cases equal, {self.not_reached} not reached, {wrong} expressions "
            "differ"
        )
        print(f"rounds differently: {len(self.rounded)} expressions, by at most {largest:.1e}")


def show_rounded(text: str, relative: float) -> None:
    print(f"rounds differently: {text}, decoded by {relative:.1e} of the largest", flush=True)


def last_lines() -> str:
    return "".join(traceback.format_exc().splitlines(keepends=True)[-6:])


def shard(text: str) -> tuple[int, int]:
    """I/N."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    number, count = (int(part) for part in found.groups()) if found else (0, 0)
    if not number < count:
        raise ArgumentTypeError(f"a shard is I/N with I below N, such as 0/16, got {text!r}")
    return number, count


def bits(wanted: str, seconds: float, shard: tuple[int, int]) -> Found:
    """All codecs on one vector, then all on the next, as far as the time goes."""
    deadline, total = time.perf_counter() + seconds, Found()
    for case in cases(wanted, shard):
        if time.perf_counter() > deadline:
            total.not_reached += 1
            continue
        try:
            found = compare(case)
        except Exception:
            found = Found(different={case.text: [f"{case.name}: {last_lines()}"]})
        for text, differences in found.different.items():
            print(f"DIFFERS {text}:", *differences, sep="\n    ", flush=True)
        for text, relative in found.rounded.items():
            show_rounded(text, relative)
        total.add(found)
    return total


def side_by_side(wanted: str, seconds: float, processes: int, script: Path) -> Found:
    """The shards of `bits`, each in a process of its own."""
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for number in range(processes):
            shard, at = f"{number}/{processes}", Path(folder, str(number))
            command = [sys.executable, str(script), "--only", "bits", "--shard", shard]
            command += ["--filter", wanted, "--seconds", str(seconds)]
            command += ["--json", str(at.with_suffix(".json"))]
            with at.with_suffix(".log").open("w") as log:
                process = subprocess.Popen(
                    command, env=environment, stdout=log, stderr=subprocess.STDOUT
                )
            started.append((shard, at, process))
        total, deadline = Found(), time.perf_counter() + seconds + GRACE_S
        for number, (shard, at, process) in enumerate(started):
            try:
                status = process.wait(max(0.0, deadline - time.perf_counter()))
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
            if status == 0:
                results = json.loads(at.with_suffix(".json").read_text())
                total.add(Found(**results["bits"]))
            else:
                tail = at.with_suffix(".log").read_text()[-1000:]
                left = sum(1 for _ in cases(wanted, (number, processes)))
                ended = f"ended with status {status}: {tail}"
                total.add(Found(not_reached=left, different={f"shard {shard}": [ended]}))
    return total


def cases(wanted: str, shard: tuple[int, int]) -> Iterator[Case]:
    """Those of a shard: with a number that leaves I if divided by N."""
    texts, number = [text for text in expressions() if wanted in text], 0
    for given in inputs():
        for text in texts:
            if number % shard[1] == shard[0]:
                yield Case(text, *given)
            number += 1


def expressions() -> Iterator[str]:
    for cls in COMPRESSION:
        if not issubclass(cls, Codec):
            continue
        for text in cls.examples or (notation_name(cls),):
            codec = COMPRESSION.parse(text)
            if isinstance(codec, Codec):
                is_coder = codec.traits.takes is Kind.SYMBOLS
                yield f"qsgd(bits=4) >> {text}" if is_coder else text


def inputs() -> Iterator[tuple[str, Tensor, Tensor]]:
    for numel, dtype in ((10_007, torch.float32), (65_536, torch.float32), (1001, torch.float64),
                         (3003, torch.float16), (3, torch.float32)):  # fmt: skip
        x = KEY.child("x").normal(numel)
        x[: numel // 5] *= 1e-3
        residual = 0.3 * KEY.child("residual").normal(numel)
        yield f"{numel} x {dtype}", x.to(dtype), residual.to(dtype)


def compare(case: Case) -> Found:
    text, name, x, residual = case
    codec = COMPRESSION.parse(text)
    assert isinstance(codec, Codec)
    spec = Spec.of(x)
    if codec.traits.layered:
        end, rows = x.numel(), x.numel() // 100
        matrix, bias = ("w", 0, 50 * rows, (rows, 50)), ("b", 50 * rows, end, (end - 50 * rows,))
        tensors = (matrix, bias) if rows else (bias,)
        spec = Spec(tuple(x.shape), x.dtype, tensors=tensors)
    here, there = (run(codec, spec, x.to(d), residual.to(d)) for d in (torch.device("cpu"), CUDA))
    found = list(differences(name, here, there))
    if not found:
        return Found(equal=1)
    most = MOST_ROUNDED_FLOAT64 if x.dtype == torch.float64 else 0.0
    if ROUNDING & set(re.findall(r"[a-z_]\w*", text)):
        most = MOST_ROUNDED
    relative = relative_difference(here[1], there[1])
    if relative is not None and relative <= most:
        return Found(rounded={f"{text} ({x.dtype})": relative})
    return Found(different={text: found})


def differences(name: str, here: list[object], there: list[object]) -> Iterator[str]:
    for what, expected, got in zip(WHAT, here, there):
        if not isinstance(expected, Tensor) or not isinstance(got, Tensor):
            if expected != got:
                yield f"{name}: {what} is {described(got)}, on the CPU {described(expected)}"
        elif (difference := differs(got.cpu(), expected)) is not None:
            yield f"{name}: {what} {difference}"


def described(result: object) -> str:
    return f"{list(result.shape)}" if isinstance(result, Tensor) else repr(result)


def relative_difference(expected: object, got: object) -> float | None:
    """The largest difference over the largest magnitude, or None where they cannot be compared."""
    if not isinstance(expected, Tensor) or not isinstance(got, Tensor):
        return None
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return None
    wide = expected.double()
    return float((got.cpu().double() - wide).abs().max() / wide.abs().max())


def run(codec: Codec, spec: Spec, x: Tensor, residual: Tensor) -> list[object]:
    results: list[object] = []

    def add(make: Callable[[], tuple[Tensor, ...]], number: int) -> None:
        try:
            results.extend(make())
        except (ValueError, NotImplementedError) as error:  # refused: on both devices, or neither
            results.extend([f"{type(error).__name__}: {error}"] * number)

    def plain() -> tuple[Tensor, ...]:
        payload = codec.encode(x, on(codec.init(spec), x.device), KEY)[0]
        received = unpack(codec, payload.buffer.clone(), spec)
        decoded, again = (codec.decode(each, spec, KEY) for each in (payload, received))
        assert differs(decoded, again) is None, "received bytes decode to something else"
        return payload.buffer, decoded

    def fed() -> tuple[Tensor, ...]:
        state = on(codec.init(spec), x.device)
        payload, lost, _ = encode_feedback(codec, x, residual, state, KEY)
        return payload.buffer, lost

    add(plain, 2)
    add(fed, 2)
    return results


def on(state: Any, device: torch.device) -> Any:
    if isinstance(state, Tensor):
        return state.to(device)
    if isinstance(state, dict):
        return {name: on(value, device) for name, value in state.items()}
    return tuple(on(value, device) for value in state) if type(state) is tuple else state


def differs(a: Tensor, b: Tensor) -> str | None:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"is {list(a.shape)} {a.dtype}, on the CPU {list(b.shape)} {b.dtype}"
    if a.is_floating_point():
        integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        where = a.contiguous().view(integer) != b.contiguous().view(integer)
    else:
        where = a != b
    count = int(where.sum())
    if not count:
        return None
    first = int(where.reshape(-1).nonzero()[0])
    values = a.reshape(-1)[first].item(), b.reshape(-1)[first].item()
    return f"differs in {count} of {a.numel()} elements, the first {first}: {values}"
