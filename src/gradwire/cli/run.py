"""`gradwire run`: one experiment."""

import json
from dataclasses import dataclass

from rich.table import Table

from gradwire.architecture import ARCHITECTURE
from gradwire.architecture.gossip.gossip import Gossip
from gradwire.architecture.graphs import describe
from gradwire.cli.console import Folder, Meter, errors, new_folder, out
from gradwire.experiment.config import Config
from gradwire.experiment.losses import told
from gradwire.experiment.record import Row
from gradwire.experiment.report import format_bytes, format_seconds, network_names
from gradwire.experiment.runner import Run, resume, simulate


@dataclass(frozen=True)
class RunCommand:
    """Run one experiment on the simulator. `--config FILE` reads settings from a TOML file."""

    config: Config
    out: Folder = None
    """Folder for the records; by default a new one under runs/."""
    resume: Folder = None
    """Go on with the interrupted run in this folder; its own settings hold."""
    json: bool = False
    """Print the summary as JSON."""

    def __call__(self) -> None:
        if self.resume is not None and (self.config != Config() or self.out is not None):
            raise ValueError("--resume goes on with the run's own settings; give no others")
        folder = self.resume or self.out or new_folder("run")
        try:
            with Meter() as meter:
                progress = meter.follow(folder.name)
                if self.resume is not None:
                    result = resume(self.resume, progress)
                else:
                    result = simulate(self.config, out=folder, progress=progress)
        except KeyboardInterrupt:
            if (folder / "config.toml").exists():
                errors.print(f"interrupted; go on: gradwire run --resume {folder}", soft_wrap=True)
            raise
        if self.json:
            print(json.dumps(result.summary))
            return
        out.print(_run_table(result))
        out.print(f"Records: {folder}", soft_wrap=True)


def _momentum(config: Config) -> str:
    """Where momentum acts, if it does not where everybody expects it."""
    return ", momentum before compression" if config.momentum_at == "before" else ""


def _run_table(run: Run) -> Table:
    config, summary = run.config, run.summary
    times = {config.bandwidth: run.virtual_time_s, **summary["virtual_times_s"]}
    table = Table(show_header=False, box=None)
    lines = {
        "task": f"{config.model} on {config.data}, {summary['parameters']:,} parameters",
        "method": f"{config.compression} | {config.synchronization} | {config.architecture} | "
        f"{config.scheduling}",
        "optimizer": f"{config.optimizer}{_momentum(config)}",
        "workers": f"{config.workers} x batch {config.batch_size}, {summary['steps']} steps",
        "test accuracy": f"{100 * run.accuracy:.2f}%",
        "bytes sent": f"{format_bytes(run.bytes_sent)} in {summary['messages_sent']:,} messages, "
        f"{format_bytes(summary['bytes_per_worker_step'])} per worker and step",
        **{
            f"virtual time at {name}": format_seconds(seconds)
            for name, seconds in zip(network_names(list(times)), times.values())
        },
        "compute time": config.compute,
        **_observed(config, summary),
        **({"dropped steps": str(n)} if (n := summary["dropped_steps"]) else {}),
        "wall time": f"{summary['wall_time_s']:.1f} s with {summary['kernels']} kernels",
    }
    for name, value in lines.items():
        table.add_row(name, value)
    return table


_WHAT = {
    "staleness": " updates between the model of a gradient and its own",
    "ahead": " steps ahead of the slowest",
    "gradients": " in a step",
    "uploads": " per worker",
}


def _observed(config: Config, summary: Row) -> dict[str, str]:
    """What only some methods have: a graph, models that differ, staleness, workers that crashed."""
    lines = {}
    architecture = ARCHITECTURE.parse(config.architecture)
    if isinstance(architecture, Gossip):
        lines["graph"] = describe(architecture.graph, config.workers)
    if summary["distance"]:
        lines["distance of models"] = f"{summary['distance']:.3g} (root mean square, to their mean)"
    for name, figures in summary["noted"].items():
        most = figures["max"]
        lines[name] = f"{figures['mean']:.3g} on average, at most {most:.0f}{_WHAT.get(name, '')}"
    for lost in summary["lost"]:
        lines[f"worker {lost['rank']} lost"] = told(lost)
    return lines
