"""What does a step of many virtual workers cost, and how does that grow with their number?

Steps of `bsp` with an mlp of 2,410 parameters on digits, batches of one sample, on four
architectures. Each case is a fresh process with one thread. A row has its peak memory, which begins
with some 400 MB for torch and the data, and the processor seconds of a step: how much longer a run
takes than one of a single step, the best of two each, after a first one that does not count.
Processor seconds of other work on the machine are not in it. Growth is that from 256 to 1,000
workers, 3.9 times as many.

    python benchmarks/scale.py --json benchmarks/scale.json

takes about three minutes; docs/commands.md shows the table.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from typing import Any

import torch

import gradwire

ARCHITECTURES = ("allreduce", "ring", "parameter_server(1)", "gossip(ring)")
STEPS = {16: 101, 64: 61, 256: 16, 1000: 5}  # by the number of workers


def seconds_of_run(architecture: str, workers: int, steps: int) -> float:
    begin = time.process_time()
    gradwire.simulate(
        model="mlp((32,))",
        workers=workers,
        batch_size=1,
        steps=steps,
        eval_every=steps,
        architecture=architecture,
        compute="fixed(0.01)",
        threads=1,
    )
    return time.process_time() - begin


def measure(architecture: str, workers: int) -> dict[str, Any]:
    """One case, in this process."""
    steps = STEPS[workers]
    seconds_of_run(architecture, workers, 1)
    single, several = (
        min(seconds_of_run(architecture, workers, each) for _ in range(2)) for each in (1, steps)
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "architecture": architecture,
        "workers": workers,
        "step_s": (several - single) / (steps - 1),
        "peak_bytes": peak * (1 if sys.platform == "darwin" else 1024),
    }


def measure_alone(architecture: str, workers: int) -> dict[str, Any]:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--case", architecture, str(workers)]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    row: dict[str, Any] = json.loads(found.stdout)
    return row


def as_table(rows: list[dict[str, Any]]) -> str:
    """In Markdown: seconds of a step and peak memory, by architecture and number of workers."""
    lines = [
        "| bsp on | " + " | ".join(f"{count:,} workers" for count in STEPS) + " | growth |",
        "|---" * (len(STEPS) + 2) + "|",
    ]
    for architecture in ARCHITECTURES:
        own = {row["workers"]: row for row in rows if row["architecture"] == architecture}
        cells = [
            f"{own[count]['step_s']:.3f} s, {own[count]['peak_bytes'] / 1e6:.0f} MB"
            for count in STEPS
        ]
        before, last = list(STEPS)[-2:]
        step = own[last]["step_s"] / own[before]["step_s"]
        peak = own[last]["peak_bytes"] / own[before]["peak_bytes"]
        lines.append(f"| `{architecture}` | {' | '.join(cells)} | {step:.1f}x, {peak:.1f}x |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="where the results are written")
    parser.add_argument("--processor", default=platform.machine(), help="named in the results")
    parser.add_argument("--case", nargs=2, metavar=("ARCHITECTURE", "WORKERS"))
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(args.case[0], int(args.case[1]))))
        return
    rows = [measure_alone(each, count) for each in ARCHITECTURES for count in STEPS]
    print(as_table(rows))
    if args.json:
        found = {
            "hardware": args.processor,
            "torch": torch.__version__,
            "commit": subprocess.getoutput("git rev-parse --short HEAD"),
            "rows": rows,
        }
        with open(args.json, "w") as file:
            json.dump(found, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
