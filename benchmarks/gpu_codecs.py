"""On a GPU: are the bytes those of the CPU, and how many copies of the tensor does a codec cost?

    python benchmarks/gpu_codecs.py [--only bits|speed|small] [--json FILE] [--commit ID]

`bits` runs every example of every codec (and every coder behind a quantiser) on CUDA and on the
CPU with the same key, and compares payload bytes, what they decode to and the residual, with its
payload. `speed` times whole codecs, payload included, in copies of the tensor, at 25 and 250
million float32: a row is the median of several groups of calls between two CUDA events, over that
of a copy in the same run. A payload that was made here is decoded; `received` ones are checked
like foreign bytes, header and checksum included, which takes the CPU. `small` has 270,000 elements
and host time: the median of single calls, each waited for. Beside them stand torch's operations,
those of torch's communication hooks and, written from the papers, those of GRACE (Xu et al. 2021),
which make no payload of bytes. A case that fails is shown and does not end the run.
"""

import argparse
import json
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradwire.compression import COMPRESSION
from gradwire.core.codec import Codec, Kind, unpack
from gradwire.core.fusion import decode_mean, encode_feedback
from gradwire.core.key import Key
from gradwire.core.notation import notation_name
from gradwire.core.spec import Spec

KEY = Key(seed=1, step=3).private(0)
CUDA = torch.device("cuda")
SMALL = 270_000
Operation = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("bits", "speed", "small"))
    parser.add_argument("--filter", default="", help="only codecs and rows with this in their name")
    parser.add_argument("--seconds", type=float, default=90, help="at most, for `bits`")
    parser.add_argument("--row-seconds", type=float, default=2, help="about, for a row of `speed`")
    parser.add_argument("--numel", type=int, nargs="*", default=[25_000_000, 250_000_000])
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--commit", default="", help="of the sources, where there is no git")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    found: dict[str, Any] = {"machine": machine(), "commit": options.commit or commit()}
    print(found, flush=True)
    chosen = [options.only] if options.only else ["small", "speed", "bits"]
    if "small" in chosen:
        found["small_us"] = small(options.filter)
    if "speed" in chosen:
        found["copies"] = {
            str(numel): speed(numel, options.filter, options.row_seconds) for numel in options.numel
        }
    if "bits" in chosen:
        found["bits"] = bits(options.filter, options.seconds)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def machine() -> dict[str, str]:
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = "none"
    name = torch.cuda.get_device_name()
    return {"gpu": name, "torch": torch.__version__, "triton": version}


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip()


def last_lines() -> str:
    return "".join(traceback.format_exc().splitlines(keepends=True)[-6:])


# --- bits -----------------------------------------------------------------------------------------


def bits(wanted: str, seconds: float) -> dict[str, Any]:
    """All codecs on one vector, then all on the next, as far as the time goes."""
    deadline = time.perf_counter() + seconds
    texts = [text for text in expressions() if wanted in text]
    equal, left, different = 0, 0, dict[str, list[str]]()
    for case in inputs():
        for text in texts:
            if time.perf_counter() > deadline:
                left += 1
                continue
            try:
                differences = list(compare(text, *case))
            except Exception:
                differences = [f"{case[0]}: {last_lines()}"]
            if differences:
                different.setdefault(text, []).extend(differences)
                print(f"DIFFERS {text}:", *differences, sep="\n    ", flush=True)
            else:
                equal += 1
    wrong = len(different)
    print(f"bits: {equal} cases equal, {left} not reached, {wrong} expressions differ", flush=True)
    return {"equal": equal, "not_reached": left, "different": different}


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


def compare(text: str, name: str, x: Tensor, residual: Tensor) -> Iterator[str]:
    codec = COMPRESSION.parse(text)
    assert isinstance(codec, Codec)
    spec = Spec.of(x)
    if codec.traits.layered:
        end, rows = x.numel(), x.numel() // 100
        matrix, bias = ("w", 0, 50 * rows, (rows, 50)), ("b", 50 * rows, end, (end - 50 * rows,))
        tensors = (matrix, bias) if rows else (bias,)
        spec = Spec(tuple(x.shape), x.dtype, tensors=tensors)
    here, there = (run(codec, spec, x.to(d), residual.to(d)) for d in (torch.device("cpu"), CUDA))
    for what, expected, got in zip(WHAT, here, there):
        if not isinstance(expected, Tensor) or not isinstance(got, Tensor):
            if expected != got:
                yield f"{name}: {what} is {got!r}, on the CPU {expected!r}"
        elif (difference := differs(got.cpu(), expected)) is not None:
            yield f"{name}: {what} {difference}"


WHAT = ("payload", "decoded", "payload with feedback", "residual")


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


# --- speed ----------------------------------------------------------------------------------------


def rows(numel: int) -> Iterator[tuple[str, float | None, Callable[[], Operation]]]:
    """Name, goal at 25 and at 250 million in copies, and what prepares the operation."""
    large = numel > 100_000_000
    x = torch.randn(numel, device=CUDA)
    residual = 0.3 * torch.randn(numel, device=CUDA)
    spec, parse = Spec.of(x), COMPRESSION.parse
    out = torch.empty_like(x)

    def encode(text: str) -> Callable[[], Operation]:
        codec = parse(text)
        return lambda: lambda: codec.encode(x, codec.init(spec), KEY)

    def feed(text: str) -> Callable[[], Operation]:
        codec = parse(text)
        return lambda: lambda: encode_feedback(codec, x, residual, codec.init(spec), KEY)

    def decode(text: str, number: int = 1, received: bool = False) -> Callable[[], Operation]:
        codec = parse(text)

        def prepare() -> Operation:
            payloads = [codec.encode(x, codec.init(spec), KEY.at(i))[0] for i in range(number)]
            keys = [KEY.at(i) for i in range(number)]
            if received:
                buffer = payloads[0].buffer.clone()
                return lambda: codec.decode(unpack(codec, buffer, spec), spec, KEY)
            if number == 1:
                return lambda: codec.decode(payloads[0], spec, KEY)
            return lambda: decode_mean(codec, payloads, spec, keys)

        return prepare

    def framed(text: str) -> Callable[[], Operation]:
        codec = parse(text)
        return lambda: lambda: codec.encode(x, codec.init(spec), KEY)[0].buffer

    yield "copy", None, lambda: lambda: out.copy_(x)
    yield "fp16", 1.5, encode("fp16")
    yield "bf16", 1.5, encode("bf16")
    yield "sign", None, encode("sign")
    yield "sign(bucket=512)", None, encode("sign(bucket=512)")
    yield "ef + sign", 3, feed("sign")
    yield "ef + sign(bucket=512)", 3, feed("sign(bucket=512)")
    yield "decode sign", 1, decode("sign")
    yield "decode sign, received", None, decode("sign", received=True)
    yield "sign with checksum", None, framed("sign")
    yield "mean of 4 signs", 1.5, decode("sign", 4)
    yield "qsgd(bits=4)", 2, encode("qsgd(bits=4)")
    yield "qsgd(bits=8)", 2, encode("qsgd(bits=8)")
    yield "ef + qsgd(bits=4)", 3, feed("qsgd(bits=4)")
    yield "decode qsgd(bits=4)", 1, decode("qsgd(bits=4)")
    yield "decode qsgd(bits=4), received", None, decode("qsgd(bits=4)", received=True)
    yield "terngrad", None, encode("terngrad")
    yield "decode terngrad", None, decode("terngrad")
    yield "natural", None, encode("natural")
    yield "fp8", None, encode("fp8")
    yield "ef + topk(0.01)", 4 if large else 6, feed("topk(0.01)")
    yield "ef + topk(0.001)", 4 if large else 6, feed("topk(0.001)")
    yield "ef + sampledk(0.01)", 3 if large else 4, feed("sampledk(0.01)")
    yield "decode topk(0.01)", 1.5, decode("topk(0.01)")
    yield "drive", 5, encode("drive")
    if not large:
        yield "polar(0.5)", 20, encode("polar(0.5)")
        yield "dq(1.0)", 200, encode("dq(1.0)")
    yield "torch: topk 1%", None, lambda: lambda: torch.topk(x.abs(), numel // 100)
    yield "torch: fp16 hook", None, lambda: lambda: out.copy_(x.to(torch.float16).div_(4))
    side = int(numel**0.5)
    yield "torch: PowerSGD hook, rank 4", None, lambda: powersgd(x[: side * side].view(side, side))
    yield "grace: ef + sign", None, lambda: lambda: grace_sign(x, residual)
    yield "grace: ef + topk 1%", None, lambda: lambda: grace_topk(x, residual, numel // 100)
    yield "grace: ef + qsgd, 4 bits", None, lambda: lambda: grace_qsgd(x, residual, 7)


def powersgd(matrix: Tensor) -> Operation:
    """What torch's hook does between its all-reduces (Vogels et al. 2019, Alg. 1)."""
    q = torch.randn(matrix.shape[1], 4, device=matrix.device)
    error = torch.zeros_like(matrix)

    def step() -> Tensor:
        total = matrix + error
        p = torch.linalg.qr(total @ q).Q
        approximation = p @ (total.t() @ p).t()
        return torch.sub(total, approximation, out=error)

    return step


def grace_sign(x: Tensor, residual: Tensor) -> object:
    """Karimireddy et al. 2019, Alg. 1, a byte for each sign."""
    total = x + residual
    mean, signs = total.abs().mean(), (total >= 0).to(torch.uint8)
    return mean, signs, total - mean * (signs.to(torch.float32) * 2 - 1)


def grace_topk(x: Tensor, residual: Tensor, k: int) -> object:
    """Stich et al. 2018, Alg. 1, int64 indices."""
    total = x + residual
    indices = torch.topk(total.abs(), k, sorted=False).indices
    values = torch.gather(total, 0, indices)
    return indices, values, total - torch.zeros_like(total).scatter_(0, indices, values)


def grace_qsgd(x: Tensor, residual: Tensor, levels: int) -> object:
    """Alistarh et al. 2017, sec. 3.1, one norm for all, a byte for each level."""
    total = x + residual
    norm, magnitude = total.norm(), total.abs()
    scaled = levels / norm * magnitude
    floor = scaled.floor()
    level = floor + (torch.rand_like(total) < scaled - floor)
    sent = (level * total.sign()).to(torch.int8)
    return norm, sent, total - norm / levels * sent.to(torch.float32)


def speed(numel: int, wanted: str, row_seconds: float) -> dict[str, Any]:
    results: dict[str, Any] = {}
    copy_ms = 0.0
    for name, goal, prepare in rows(numel):
        if wanted not in name and name != "copy":
            continue
        try:
            ms = median_ms(prepare(), row_seconds)
        except Exception:
            results[name] = {"failed": last_lines()}
            print(f"FAILED {name}: {last_lines()}", flush=True)
            continue
        finally:
            torch.cuda.empty_cache()
        copy_ms = copy_ms or ms
        copies = ms / copy_ms
        missed = goal is not None and copies > goal
        results[name] = {"ms": round(ms, 4), "copies": round(copies, 2), "goal": goal}
        print(
            f"{numel // 1_000_000:4} M  {name:34} {ms:9.3f} ms {copies:8.2f} copies"
            + (f"  (goal {goal}{', missed' if missed else ''})" if goal is not None else ""),
            flush=True,
        )
    return results


def median_ms(operation: Operation, seconds: float) -> float:
    """Of groups of calls. The first call compiles and is not counted."""
    operation()
    torch.cuda.synchronize()
    start = time.perf_counter()
    operation()
    torch.cuda.synchronize()
    once_s = time.perf_counter() - start
    calls = max(1, min(10, int(seconds / 10 / once_s)))
    groups = max(1, min(9, int(seconds / (calls * once_s))))
    times = []
    for _ in range(groups):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            operation()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / calls)
    return statistics.median(times)


def small(wanted: str) -> dict[str, Any]:
    """Microseconds of single calls, which are waited for."""
    x = torch.randn(SMALL, device=CUDA)
    residual = 0.3 * torch.randn(SMALL, device=CUDA)
    spec, results = Spec.of(x), {}
    cases: list[tuple[str, float | None, Callable[[Codec], object]]] = [
        ("encode", 80, lambda codec: codec.encode(x, codec.init(spec), KEY)),
        ("ef", 80, lambda codec: encode_feedback(codec, x, residual, codec.init(spec), KEY)),
        ("parts", None, lambda codec: codec.encode(x, codec.init(spec), KEY)[0].parts),
        ("buffer", None, lambda codec: codec.encode(x, codec.init(spec), KEY)[0].buffer),
    ]
    for text in ("fp16", "sign", "sign(bucket=512)", "qsgd(bits=4)", "topk(0.01)", "topk(0.001)"):
        for name, goal, call in cases:
            label = f"{text}: {name}"
            if wanted not in label:
                continue
            try:
                codec = COMPRESSION.parse(text)
                assert isinstance(codec, Codec)
                us = median_us(lambda call=call, codec=codec: call(codec))
            except Exception:
                results[label] = {"failed": last_lines()}
                print(f"FAILED {label}: {last_lines()}", flush=True)
                continue
            goal = 150 if goal and text.startswith("topk") else goal
            results[label] = {"us": round(us, 1), "goal": goal}
            print(f"{SMALL} {label:30} {us:8.1f} us" + (f"  (goal {goal})" if goal else ""))
    return results


def median_us(operation: Operation, rounds: int = 100) -> float:
    times = []
    for number in range(rounds + 20):
        start = time.perf_counter()
        operation()
        torch.cuda.synchronize()
        if number >= 20:
            times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


if __name__ == "__main__":
    main()
