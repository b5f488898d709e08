"""How long does an epoch of CIFAR-10 with ResNet-20 take on the simulator, by method?

    python benchmarks/epoch.py --device cuda                  # all methods
    python benchmarks/epoch.py --device cuda --only bsp dgc --profile
    python benchmarks/epoch.py --device cpu --synthetic --only bsp --steps 2 --workers 4

Each method trains for some steps; after `--warm` of them the clock runs for `--steps` more. An
epoch is the median step times the steps of an epoch: EXTRAPOLATED, no epoch is run to its end. The
median, because now and then a step draws a new order of the data. Batches, augmentation, gradient,
coding, messages and update are in it, evaluation is not: `eval` is one of one model on the 10,000
test images, after a first one. `first` is from the beginning of the method to the
end of its first step, tracing and compiling included (imports and, with --synthetic, data apart:
the first line has them). The clock waits for the device at both ends only.

Data: CIFAR-10 from $GRADWIRE_DATA, or with --synthetic random images of its shape, whose times are
the same. A method that fails is reported and left out. After `--seconds` no further step begins.

Asked for on an H200, 32 workers x 32 unless said otherwise: bsp <= 0.8 s, topk, dgc, qsgd and
localsgd <= 1.0, gossip <= 1.2, choco <= 2, bsp on 4 workers <= 2; first step <= 30 s with a warm
cache, evaluation <= 0.2 s. Results: benchmarks/README.md.
"""

import time

BEGAN = time.perf_counter()

import argparse  # noqa: E402
import contextlib  # noqa: E402
import statistics  # noqa: E402
import traceback  # noqa: E402
import warnings  # noqa: E402
from collections import Counter  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402

import gradwire  # noqa: E402
from gradwire.core.key import Key  # noqa: E402
from gradwire.data.dataset import Dataset  # noqa: E402
from gradwire.experiment.run import subject  # noqa: E402
from gradwire.experiment.run.config import Config  # noqa: E402
from gradwire.experiment.run.setup import Experiment, prepare  # noqa: E402
from gradwire.experiment.simulate.simulation import simulate_prepared  # noqa: E402

METHODS: dict[str, dict[str, Any]] = {
    "bsp": {},
    "topk": {"compression": "ef(topk(0.001))"},
    "dgc": {"compression": "dgc(0.001)"},
    "qsgd": {"compression": "qsgd(bits=4)"},
    "sign": {"compression": "ef(sign)"},
    "localsgd": {"synchronization": "localsgd(8)"},
    "gossip": {"architecture": "gossip(ring)"},
    "choco": {"architecture": "gossip(ring, choco(0.3))", "compression": "topk(0.01)"},
    "bsp4": {"workers": 4},
}
GOALS = {"bsp": 0.8, "topk": 1.0, "dgc": 1.0, "qsgd": 1.0, "localsgd": 1.0}
GOALS |= {"gossip": 1.2, "choco": 2.0, "bsp4": 2.0}


class Enough(Exception):
    """All steps are measured, or the time is up."""


class Clock:
    """Takes the time when rank 0 finishes a step: all workers are within one step of it."""

    def __init__(self, device: torch.device, warm: int, last: int, until: float) -> None:
        self.device, self.warm, self.last, self.until = device, warm, last, until
        self.began = time.perf_counter()
        self.first_s = float("nan")
        self.steps: list[float] = []  # when each step after the warm-up ended, by the host
        self.profiler: Any = None
        self.synchronized: list[float] = []  # the ends of the measurement, by the device

    def worker_started(self, worker: Any) -> None:
        pass

    def wait(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def step_finished(self, rank: int, step: int, replica: Any, now: float) -> None:
        if rank != 0:
            return
        if step == 0:
            self.first_s = self.wait() - self.began
        if step == self.warm - 1:
            self.synchronized.append(self.wait())
            if self.profiler is not None:
                self.profiler.start()
        if step >= self.warm - 1:
            self.steps.append(time.perf_counter())
        if step == self.last or time.perf_counter() > self.until:
            self.synchronized.append(self.wait())
            raise Enough

    def finish(self) -> tuple[float, float, int]:
        """The median and the mean step, in seconds, and how many there were."""
        if len(self.steps) < 2:
            raise RuntimeError("the time was up before a step could be measured: --seconds")
        took = [after - before for before, after in zip(self.steps, self.steps[1:])]
        mean = (self.synchronized[-1] - self.synchronized[0]) / len(took)
        return statistics.median(took), mean, len(took)


def synthetic() -> Dataset:
    """Random images with the shapes of CIFAR-10."""

    def images(name: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        key = Key(7).child(name)
        words = key.words(count * 3 * 32 * 32 // 4)
        pixels = words.view(torch.uint8).reshape(count, 3, 32, 32)
        return pixels, key.child("labels").integers(count, 10).to(torch.uint8)

    train, test = images("train", 50_000), images("test", 10_000)
    moments = {"mean": (127.5,) * 3, "std": (73.9,) * 3}
    return Dataset("cifar10", "image", *train, *test, 10, augmentable=True, **moments)


def measure(name: str, args: argparse.Namespace, until: float) -> None:
    settings: dict[str, Any] = {"workers": args.workers, **METHODS[name]}
    steps = args.warm + args.steps
    # Everything that can be is resolved before the clock runs, but for the first gradient.
    config = Config(
        data="cifar10",
        model="resnet20",
        batch_size=32,
        optimizer="sgd(0.1, momentum=0.9)",
        steps=steps,
        eval_every=steps,
        device=args.device,
        compute="fixed(0.01)",
        compile=args.compile,
        tf32=args.tf32,
        channels_last=args.channels_last,
        **settings,
    )
    device = torch.device(args.device)
    clock = Clock(device, args.warm, steps - 1, until)
    experiment = prepare(config)
    if args.profile:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        clock.profiler = torch.profiler.profile(activities=activities)
    with contextlib.suppress(Enough):
        simulate_prepared(experiment, observer=clock)
    if clock.profiler is not None and len(clock.steps) > 1:
        clock.profiler.stop()
    median, mean, count = clock.finish()
    epoch = median * experiment.steps_per_epoch
    goal = f"{GOALS[name]:.1f}" if name in GOALS else "-"
    print(
        f"{name:10} {config.workers:3} workers  epoch {epoch:7.2f} s (extrapolated; goal {goal})  "
        f"step {median * 1e3:8.1f} ms median, {mean * 1e3:8.1f} mean of {count}  "
        f"first {clock.first_s:6.1f} s  eval {evaluation_s(experiment, clock):6.2f} s",
        flush=True,
    )
    if clock.profiler is not None:
        show(clock.profiler, count)


def evaluation_s(experiment: Experiment, clock: Clock) -> float:
    """One evaluation of one model; the second, since the first one chooses algorithms."""
    task = experiment.plan.task
    seconds = 0.0
    for _ in range(2 if clock.device.type == "cuda" else 1):
        began = clock.wait()
        task.evaluate(task.initial_params(), task.initial_buffers(), experiment.test_batches())
        seconds = clock.wait() - began
    return seconds


def show(profiler: Any, steps: int) -> None:
    """Per step: what took most time of the host, how often kernels started and the host waited."""
    events = profiler.key_averages()
    counts = Counter({event.key: event.count for event in events})
    names = (
        "cudaLaunchKernel",
        "cuLaunchKernel",
        "cuLaunchKernelEx",
        "cudaLaunchKernelExC",
        "cudaMemcpyAsync",
        "cudaStreamSynchronize",
        "cudaDeviceSynchronize",
        "aten::item",
        "aten::_local_scalar_dense",
    )
    found = ", ".join(f"{name} {counts[name] / steps:.0f}" for name in names if counts[name])
    print(f"  per step: {found or 'no launches (CPU)'}")
    print(events.table(sort_by="self_cpu_time_total", row_limit=15, max_name_column_width=60))
    if torch.cuda.is_available():
        print(events.table(sort_by="self_cuda_time_total", row_limit=10, max_name_column_width=60))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=40, help="that are measured")
    parser.add_argument("--warm", type=int, default=12, help="steps before the clock runs")
    parser.add_argument("--seconds", type=float, default=480.0, help="for all of it")
    parser.add_argument("--compile", default="always", choices=["auto", "always", "never"])
    parser.add_argument("--tf32", default="convolutions", choices=["none", "convolutions", "all"])
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--synthetic", action="store_true", help="random images, no files")
    parser.add_argument("--profile", action="store_true", help="a table of launches and host time")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.synthetic:
        data = synthetic()
        subject.data.load = lambda name: data
    where = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
    print(
        f"gradwire {gradwire.__version__}, torch {torch.__version__}, {where}, compile "
        f"{args.compile}, tf32 {args.tf32}, channels_last {args.channels_last}; imports and data "
        f"{time.perf_counter() - BEGAN:.1f} s",
        flush=True,
    )
    end = BEGAN + args.seconds
    for number, name in enumerate(args.only):
        now = time.perf_counter()
        if now > end:
            print(f"{name:10} left out: {args.seconds:.0f} s are over", flush=True)
            continue
        # What is left is shared; the first one may take long, since it compiles.
        share = (end - now) / (len(args.only) - number)
        try:
            measure(name, args, end if number == 0 else now + max(share, 20.0))
        except Exception:
            lines = traceback.format_exc().strip().splitlines()
            print(f"{name:10} FAILED: " + " | ".join(lines[-3:]), flush=True)


if __name__ == "__main__":
    main()
