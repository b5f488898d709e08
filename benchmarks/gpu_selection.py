"""On a GPU: are selections from long vectors those of the C library, and where does the time go?

    python benchmarks/gpu_selection.py [--only bits|kernels|waits] [--numel N ...]

`bits` selects from vectors that are hard to sample: heavy tails, layers of very different scale,
equal magnitudes, zeros; it compares positions, values, what is left and the coded positions with
the CPU's. `kernels` lists the device time of each kernel of a codec, and `waits` counts how often
the host waits in an encode and a decode. A case that fails is shown and does not end the run.
"""

import argparse
import time
import traceback
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.coding.indices import decode_indices, encode_indices
from gradwire.compression import COMPRESSION
from gradwire.core.fusion import encode_feedback
from gradwire.core.key import Key
from gradwire.core.spec import Spec

KEY = Key(seed=1, step=3).private(0)
CODECS = ("topk(0.01)", "topk(0.001)", "sampledk(0.01)", "topk(0.01) >> qsgd(bits=4)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("bits", "kernels", "waits"))
    parser.add_argument("--numel", type=int, nargs="*", default=[20_000, 270_000, 25_000_001])
    options = parser.parse_args()
    chosen = [options.only] if options.only else ["bits", "kernels", "waits"]
    if "bits" in chosen:
        for numel in options.numel:
            failed = sum(not report(*case) for case in bits(numel))
            print(f"bits of {numel}: {failed} cases failed", flush=True)
    for numel in options.numel:
        for text in CODECS:
            if "kernels" in chosen:
                report(f"kernels of {text}, {numel}", lambda t=text, n=numel: profile(t, n))
            if "waits" in chosen:
                report(f"waits of {text}, {numel}", lambda t=text, n=numel: waits(t, n))


def report(name: str, run: Callable[[], str]) -> bool:
    start = time.perf_counter()
    try:
        result = run()
    except Exception:
        print(f"{name}: FAILED\n{traceback.format_exc(limit=-4)}", flush=True)
        return False
    print(f"{name}: {result} ({time.perf_counter() - start:.1f} s)", flush=True)
    return True


def vectors(numel: int) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(numel, generator=generator)
    yield "normal", normal
    yield "heavy tails", normal / torch.rand(numel, generator=generator)
    scales = torch.logspace(-6, 2, 40)[torch.randperm(40, generator=generator)]
    yield "layers", normal * scales.repeat_interleave(-(-numel // 40))[:numel]
    yield "halves", (normal * 1e-3).half().float()
    yield "few magnitudes", (2 * normal).round()
    yield "zeros", torch.where(torch.rand(numel, generator=generator) < 1e-3, normal, 0.0)
    yield "one number", torch.ones(numel)


def bits(numel: int) -> Iterator[tuple[str, Callable[[], str]]]:
    for name, x in vectors(numel):
        residual = 0.3 * x.flip(0)
        for density in (1e-3, 0.01, 0.3):
            count = max(1, round(density * numel))
            for operation, arguments in (
                ("select_largest", (count,)),
                ("select_above", (float(x.abs().topk(count).values.min()), count)),
            ):
                yield (
                    f"{operation} {density} of {numel}, {name}",
                    lambda x=x, r=residual, o=operation, a=arguments: compare(o, x, r, *a),
                )
        yield f"draw_candidates of {numel}, {name}", lambda x=x: compare_drawn(x)


def compare(operation: str, x: Tensor, residual: Tensor, *arguments: float) -> str:
    found = []
    for device in ("cuda", "cpu"):
        left = torch.full_like(x, torch.nan, device=device)
        given = x.to(device), residual.to(device)
        indices, values = getattr(kernels, operation)(*given, *arguments, left)
        coded = encode_indices(indices, x.numel())
        assert torch.equal(decode_indices(coded, x.numel(), len(indices)), indices), "decoded"
        found.append([part.cpu() for part in (indices, values.view(torch.int32), left, coded)])
    for name, ours, theirs in zip(("positions", "values", "what is left", "code"), *found):
        assert torch.equal(ours, theirs), f"other {name}: {ours[:9]}, expected {theirs[:9]}"
    return "equal"


def compare_drawn(x: Tensor) -> str:
    factor = 655.36 / max(1e-30, float(x.abs().mean()))
    found, expected = (
        [part.cpu() for part in kernels.draw_candidates(given, factor, KEY.seed, KEY.stream)]
        for given in (x.cuda(), x)
    )
    assert all(map(torch.equal, found, expected)), "other candidates"
    return "equal"


def calls(text: str, numel: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Encode with feedback, and decode."""
    codec = COMPRESSION.parse(text)
    x = torch.randn(numel, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    residual, out, spec = x.flip(0), torch.empty_like(x), Spec.of(x)
    state = codec.init(spec)
    payload, _, _ = encode_feedback(codec, x, residual, state, KEY, out)
    return (
        lambda: encode_feedback(codec, x, residual, state, KEY, out),
        lambda: codec.decode(payload, spec, KEY),
    )


def profile(text: str, numel: int) -> str:
    rows = []
    for name, call in zip(("encode", "decode"), calls(text, numel)):
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            call()
        torch.cuda.synchronize()
        whole = (time.perf_counter() - start) / 20 * 1e6
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(5):
                call()
            torch.cuda.synchronize()
        events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
        total = sum(event.self_device_time_total for event in events) / 5
        rows.append(f"{name} {whole:.0f} us, on the device {total:.0f}:")
        rows += [
            f"    {event.self_device_time_total / 5:8.1f} us in {event.count / 5:.0f} x "
            f"{event.key[:70]}"
            for event in events[:16]
        ]
    return "\n  ".join(rows)


def waits(text: str, numel: int) -> str:
    counts = []
    for call in calls(text, numel):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        places = [f"{w.filename.rpartition('/')[2]}:{w.lineno}" for w in caught]
        counts.append(f"{len(places)} {places}")
    return f"encode {counts[0]}, decode {counts[1]}"


if __name__ == "__main__":
    main()
