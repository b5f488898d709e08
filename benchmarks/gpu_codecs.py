"""On a GPU: are the bytes those of the CPU, and how many copies of the tensor does a codec cost?

    python benchmarks/gpu_codecs.py [--only bits|speed|small] [--json FILE] [--commit ID]
    python benchmarks/gpu_codecs.py --only bits --processes 16 --seconds 180

`bits` runs every example of every codec (and every coder behind a quantiser) on CUDA and on the CPU
with the same key, and compares payload bytes, what they decode to and the residual, with its
payload (gpu_bits.py). Most of that is compiling, which `--processes` does side by side. `speed`
times whole codecs, payload included, in copies of the tensor, at 25 and 250 million float32: a row
is the median of several groups of calls between two CUDA events, over that of a copy in the same
run. A payload that was made here is decoded; `received` ones are checked like foreign bytes, header
and checksum included, which takes the CPU. `small` has 270,000 elements and host time: the median
of single calls, each waited for. Beside them stand torch's operations, those of torch's
communication hooks and, written from the papers, those of GRACE (Xu et al. 2021), which make no
payload of bytes. A case that fails is shown and does not end the run.
"""

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_bits import CUDA, KEY, bits, last_lines, shard, side_by_side
from gradwire.compression import COMPRESSION
from gradwire.core.codec import Codec, unpack
from gradwire.core.fusion import decode_mean, encode_feedback
from gradwire.core.spec import Spec

SMALL = 270_000
Operation = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("bits", "speed", "small"))
    parser.add_argument("--filter", default="", help="only codecs and rows with this in their name")
    parser.add_argument("--seconds", type=float, default=90, help="at most, for `bits`")
    parser.add_argument(
        "--shard", type=shard, help="I/N: of `bits` the cases with number %% N == I"
    )
    parser.add_argument("--processes", type=int, help="so many shards of `bits` side by side")
    parser.add_argument("--row-seconds", type=float, default=2, help="about, for a row of `speed`")
    parser.add_argument("--numel", type=int, nargs="*", default=[25_000_000, 250_000_000])
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--commit", default="", help="of the sources, where there is no git")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    if (options.shard or options.processes) and options.only != "bits":
        parser.error("--shard and --processes divide `bits` alone: add --only bits")
    if options.shard and options.processes:
        parser.error("--processes makes the shards itself: leave out --shard")
    if options.processes is not None and options.processes < 1:
        parser.error(f"--processes takes 1 or more, got {options.processes}")
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
        given = options.filter, options.seconds
        if options.processes:
            results = side_by_side(*given, options.processes, Path(__file__))
        else:
            results = bits(*given, options.shard or (0, 1))
        results.show(listed=bool(options.processes))
        found["bits"] = asdict(results)
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
