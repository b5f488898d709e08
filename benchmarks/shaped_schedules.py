"""How far is the simulator's step time from the real one, for every schedule on shaped links?

Four ranks, each on a host of its own whose link carries so many Mbit/s each way (shaped.py; needs
to be root), all on the cores of this machine. In one run for each rate: the probe measures the
ranks (experiment/studies/processor.py, network_fit.py); then every schedule runs with every codec
for real; then the simulator gets what the probe measured, and nothing else, and runs the same
configurations. Time of a step: the median over the steps of rank 0, the first ones left out.
Other work on the machine changes what ranks get and how fast cores are, so it is probed before and
after each schedule, and the number of cores and the processor time of a gradient before and after
each run; the mean of both counts. A run is predicted with the costs that the probe found, times
what a gradient took longer beside the run than beside the probe.

    python benchmarks/shaped_schedules.py --json shaped_schedules.json

takes about five minutes on two cores. `cpu` is the processor time of all ranks in a step, measured
and simulated; `cores` how many cores the ranks got. The cause of a miss is named from them.
"""

import argparse
import json
import os
import platform
import subprocess
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradwire.core.protocols import Replica
from gradwire.experiment.processes.headers import HEADERS
from gradwire.experiment.processes.launch.signals import Signals
from gradwire.experiment.processes.node.run import NodeRun
from gradwire.experiment.processes.node.types import RunFolder
from gradwire.experiment.processes.ranks import rank_of
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.setup import prepare, warm_up
from gradwire.experiment.simulate.simulation import simulate_prepared
from gradwire.experiment.studies.network_fit import calibrate, settings_on_cores
from gradwire.experiment.studies.prediction import works_of
from gradwire.experiment.studies.processor import (
    Processor,
    average,
    measure_processor,
)
from gradwire.runtime.process.engine import ProcessEngine
from gradwire.runtime.process.gloo import GlooTransport
from gradwire.runtime.virtual.host import Cores
from gradwire.training.plan import Plan
from gradwire.training.worker import TrainingWorker
from ranks import on_ranks
from shaped import shaped

RANKS = 4
# Four layers of equal size, so that there is something to overlap.
BASE = Config(
    model="mlp((256, 256, 256, 256))",
    batch_size=128,
    workers=RANKS,
    optimizer="sgd(0.01)",
    threads=1,
)
SCHEDULES = (
    "sequential",
    "wfbp",
    "fusion(300000, first=100000)",
    "mgwfbp",
    "priority(300000, credit=1200000)",
    "dear(300000)",
)
CODECS = ("identity", "fp16", "ef(sign)", "ef(topk(0.01))")
WITHIN = 0.15
SKIPPED = 4  # steps of a run in which connections are made and memory is allocated
SIMULATED_STEPS = 8
PROBE_S = 1.0  # for which each kind of gradient is measured
PACE_S = 0.5  # for which all ranks compute, to see how many cores they get and how fast these are
BUSY = 0.85  # from this share of the cores on, a step is bound by them


class Pace(NamedTuple):
    """What all ranks together get of the machine."""

    cores: float
    gradient_s: float  # processor time of one

    @staticmethod
    def mean(*paces: "Pace") -> "Pace":
        return Pace(*(mean(values) for values in zip(*paces)))


def measure(rank: int, schedules: Sequence[str], codecs: Sequence[str], steps: int) -> Any:
    """What the probe found, and for every cell what was measured and simulated. On every rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    base = replace(BASE, engine="process", steps=steps, eval_every=steps)
    plan = prepare(replace(base, scheduling="wfbp")).plan
    evaluate = warm_up(plan, rank)
    probes, paces, alone_s = [probe(plan, rank)], [pace(evaluate)], [gradient_alone_s(evaluate)]
    cells = []
    for scheduling in schedules:
        for compression in codecs:
            node = run_real(replace(base, scheduling=scheduling, compression=compression))
            cells.append((node.experiment.config.scheduling, compression, *node.figures()))
            paces.append(pace(evaluate))
        probes.append(probe(plan, rank))
        alone_s.append(gradient_alone_s(evaluate))
    if rank:
        return None
    found = []
    for number, (before, after) in enumerate(pairwise(probes)):
        first, last = number * len(codecs), (number + 1) * len(codecs)
        beside = [Pace.mean(*pair) for pair in pairwise(paces[first : last + 1])]
        # The simulator codes now, on a machine that may have another speed than then.
        faster = mean(alone_s[number : number + 2]) / timed(evaluate).gradient_s
        found.append(
            simulate_cells(
                average(before, after),
                cells[first:last],
                beside,
                Pace.mean(paces[first], paces[last]).gradient_s,
                faster,
            )
        )
    return found


def probe(plan: Plan, rank: int) -> Processor:
    transport = GlooTransport(headers=HEADERS)
    engine = ProcessEngine(
        transport, evaluate=plan.task.gradients, evaluate_layers=plan.task.gradient_by_layer
    )
    program = partial(measure_processor, works=works_of(plan, rank), seconds=PROBE_S)
    processor = engine.run(program)
    assert processor is not None
    transport.close()
    return processor


def simulate_cells(
    processor: Processor,
    cells: Sequence[tuple[str, str, float, float]],
    paces: Sequence[Pace],
    probed_gradient_s: float,
    faster: float,
) -> dict[str, Any]:
    """What the probe found, and the cells of one schedule.

    `paces`: beside the cells. `probed_gradient_s`: of a gradient beside the probe. `faster`: how
    many times as fast as beside the probe this machine codes now.
    """
    found = calibrate(processor, RANKS)
    rows = []
    for (scheduling, compression, measured_s, cpu_s), pace in zip(cells, paces):
        longer = pace.gradient_s / probed_gradient_s
        host = slower(found.host, longer)
        own = replace(found, host=replace(host, count=round(pace.cores, 3)))
        overlaps = not scheduling.startswith("sequential")
        settings = settings_on_cores(slower_gradients(processor, longer), own, RANKS, overlaps)
        settings["coding_slowdown"] = round(processor.slowdown * longer * faster, 3)
        simulated_s, simulated_cpu_s = simulated_step(
            replace(
                BASE,
                **settings,
                scheduling=scheduling,
                compression=compression,
                steps=SIMULATED_STEPS,
                eval_every=SIMULATED_STEPS,
            )
        )
        rows.append(
            {
                "scheduling": scheduling.split("(")[0],
                "compression": compression,
                "measured_s": measured_s,
                "simulated_s": simulated_s,
                "ratio": simulated_s / measured_s,
                "cores": pace.cores,
                "slower": longer,
                "measured_cpu_s": cpu_s,
                "simulated_cpu_s": simulated_cpu_s,
            }
        )
    return {"processor": asdict(processor), "settings": settings, "rows": rows}


def slower(host: Cores, factor: float) -> Cores:
    """Threads that take so many times as long for messages."""
    costs = {name: getattr(host, name) for name in ("send", "receive", "transfer", "wake")}
    return replace(host, **{name: (factor * a, factor * b) for name, (a, b) in costs.items()})


def slower_gradients(processor: Processor, factor: float) -> Processor:
    layers_s = tuple(factor * own for own in processor.layers_s)
    return replace(processor, gradient_s=factor * processor.gradient_s, layers_s=layers_s)


def pace(evaluate: Callable[[], object]) -> Pace:
    """What all ranks get while all compute. All ranks call it."""
    dist.barrier()
    own = timed(evaluate)
    total = torch.tensor([own.cores, own.gradient_s / RANKS], dtype=torch.float64)
    dist.all_reduce(total)
    return Pace(*total.tolist())


def gradient_alone_s(evaluate: Callable[[], object]) -> float:
    """Processor time of a gradient of rank 0, while the others wait. All ranks call it."""
    dist.barrier()
    seconds = timed(evaluate).gradient_s if dist.get_rank() == 0 else 0.0
    dist.barrier()
    return seconds


def timed(evaluate: Callable[[], object]) -> Pace:
    """Of this process."""
    began, cpu, count = time.monotonic(), time.process_time(), 0
    while time.monotonic() - began < PACE_S:
        evaluate()
        count += 1
    cpu_s = time.process_time() - cpu
    return Pace(cpu_s / (time.monotonic() - began), cpu_s / count)


class TimedRun(NodeRun):
    """A rank that notes when its steps end, and its processor time."""

    def step_finished(self, rank: int, step: int, replica: Replica, now: float) -> None:
        super().step_finished(rank, step, replica, now)
        self.ends = [*getattr(self, "ends", []), (now, time.process_time())]

    def figures(self) -> tuple[float, float]:
        """Median seconds of a step, and processor seconds of all ranks in one. All ranks call."""
        ends = self.ends[SKIPPED:]
        (_, cpu), (_, last_cpu) = ends[0], ends[-1]
        step_s = median(after[0] - before[0] for before, after in pairwise(ends))
        total = torch.tensor([(last_cpu - cpu) / (len(ends) - 1)], dtype=torch.float64)
        dist.all_reduce(total)
        return step_s, float(total)


def run_real(config: Config) -> TimedRun:
    with rank_of(TimedRun, config, RunFolder(None), 0.0, 120.0, signals=Signals()) as node:
        node.run()
    return node


class _Ends:
    """Notes when the steps of rank 0 end in virtual time."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def worker_started(self, worker: TrainingWorker) -> None:
        pass

    def step_finished(self, rank: int, step: int, replica: Replica, now: float) -> None:
        if rank == 0:
            self.ends.append(now)


def simulated_step(config: Config) -> tuple[float, float]:
    """Median seconds of a step, and processor seconds of all ranks in one."""
    observer = _Ends()
    run = simulate_prepared(prepare(config), observer=observer)
    step_s = median(after - before for before, after in pairwise(observer.ends[2:]))
    return step_s, run.summary["processor_time_s"] / SIMULATED_STEPS


def cause(row: dict[str, Any]) -> str:
    """Why a cell is off, as far as its figures tell."""
    cpu = row["simulated_cpu_s"] / row["measured_cpu_s"]
    is_bound = row["measured_cpu_s"] > BUSY * row["cores"] * row["measured_s"]
    if is_bound and abs(cpu - 1) > WITHIN:
        return f"bound by the cores, and the model of processor time is off ({cpu:.2f})"
    if row["measured_cpu_s"] > 1.1 * row["cores"] * row["measured_s"]:
        return "bound by the cores, of which there were more than before the run"
    if is_bound:
        return "bound by the cores"
    return "bound by neither cores nor messages alone"


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    names = ("measured_s", "simulated_s", "ratio", "measured_cpu_s", "simulated_cpu_s", "cores")
    for row in rows:
        values = [row[name] * (1e3 if name.endswith("_s") else 1) for name in names]
        is_near = abs(row["ratio"] - 1) <= WITHIN
        print(
            f"{row['scheduling']:12} {row['compression']:16}",
            *(f"{value:9.2f}" for value in values),
            "" if is_near else f" miss: {cause(row)}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbit", type=float, nargs="*", default=[100.0, 1000.0])
    parser.add_argument("--schedules", nargs="*", default=list(SCHEDULES))
    parser.add_argument("--codecs", nargs="*", default=list(CODECS))
    parser.add_argument("--steps", type=int, default=32, help="of each real run")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    began, results = time.monotonic(), {}
    heads = ("ms", "simulated", "ratio", "cpu ms", "simulated", "cores")
    for mbit in args.mbit:
        with shaped(mbit, RANKS) as (_, hosts):
            options = (args.schedules, args.codecs, args.steps)
            results[f"{mbit:g}"] = on_ranks(RANKS, measure, *options, hosts=hosts)[0]
        print(f"{mbit:g} Mbit/s, {RANKS} ranks")
        print(f"{'schedule':12} {'codec':16}", *(f"{head:>9}" for head in heads))
        for found in results[f"{mbit:g}"]:
            print_rows(found["rows"])
        print("probed:", json.dumps(found["settings"]))
    rows = [row for founds in results.values() for found in founds for row in found["rows"]]
    near = sum(abs(row["ratio"] - 1) <= WITHIN for row in rows)
    print(
        f"{near} of {len(rows)} within {WITHIN:.0%} ({near / len(rows):.0%}), "
        f"{time.monotonic() - began:.0f} s"
    )
    if args.json is not None:
        about = {
            "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
            "torch": torch.__version__,
            "commit": subprocess.getoutput("git rev-parse --short HEAD"),
        }
        args.json.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
