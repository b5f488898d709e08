"""`gradwire run`: one experiment."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from gradwire.cli.console import Folder, Meter, new_folder, out
from gradwire.cli.defaults import default_config, world_size
from gradwire.cli.ending import FINISHED, say, stopping
from gradwire.core.units import format_bytes
from gradwire.experiment.processes.launch.signals import Interrupted
from gradwire.experiment.report.comparison import (
    counted_headers,
    format_seconds,
    network_names,
)
from gradwire.experiment.report.score import format_score, format_spread, has_spread, score_name
from gradwire.experiment.run.config import Config

if TYPE_CHECKING:
    from gradwire.experiment.run.outcome import Run
    from gradwire.experiment.run.record import Record, Row


@dataclass(frozen=True)
class RunCommand:
    """Run one experiment, on the simulator or with `--engine process` on real processes.

    `--config FILE` reads settings from a TOML file.
    """

    config: Config
    out: Folder = None
    """Folder for the records; by default a new one under runs/."""
    resume: Folder = None
    """Resume the interrupted run in this folder, with its own settings."""
    restart: bool = False
    """With --resume: begin again from step 0 if the checkpoints are damaged or missing."""
    replay: Folder = None
    """Replay the run in this folder from the order that its processes recorded."""
    json: bool = False
    """Print the summary as JSON."""
    checkpoint_every: str = "30s"
    """Real processes: how often to write checkpoints, besides when the model is evaluated."""
    timeout: str = "300s"
    """Real processes: how long nothing may happen before the run stops."""
    restarts: int = 0
    """Real processes: how often to restart the ranks, from the last checkpoint, if one dies."""
    durable: bool = False
    """Real servers: acknowledge updates only when they are on disk."""
    silence: str = "5s"
    """Real servers: how long a worker may be silent before it is lost."""
    join_wait: str = "60s"
    """Real servers: how long to wait at the start until all nodes have joined."""

    def __call__(self) -> None:
        from gradwire.cli.processes import ProcessRun, run_processes
        from gradwire.experiment.run.record import Record

        if self.replay is not None:
            self._replay(self.replay)
            return
        if self.resume is not None and (
            self.config != default_config(None) or self.out is not None
        ):
            raise ValueError("--resume continues with the run's own settings; give no others")
        if self.restart and self.resume is None:
            raise ValueError("--restart goes with --resume FOLDER: it lets that run begin again")
        folder = self.resume or self.out or new_folder("run")
        config = self.config if self.resume is None else Record.open(folder).config
        if self.resume is not None and world_size() is None and Record(folder).is_finished:
            self._show_finished(Record(folder))
        elif config.engine == "process":
            job = ProcessRun(
                config,
                folder,
                self.resume is not None,
                self.checkpoint_every,
                self.timeout,
                self.restarts,
                self.resume is not None or self.out is not None,
                self.json,
                self.durable,
                self.silence,
                self.join_wait,
                self.restart,
            )
            run_processes(job, lambda run, where: show_run(run, where, self.json))
        elif world_size() is not None:
            raise ValueError(
                "the simulator is one process, and this is one of several (WORLD_SIZE is set): "
                "write --engine process, or start it without torchrun"
            )
        elif self.restarts or self.durable:
            raise ValueError("--restarts and --durable are for --engine process")
        else:
            show_run(self._simulate(folder), folder, self.json)

    def _replay(self, folder: Path) -> None:
        from gradwire.experiment.processes.replay import replay

        others = (self.resume, self.out)
        if self.config != default_config(None) or any(one is not None for one in others):
            raise ValueError("--replay takes the run's own settings; give no others")
        replayed = replay(folder)
        show_run(replayed.run, folder, self.json)
        if not replayed.is_equal:
            sys.exit(1)

    def _show_finished(self, record: Record) -> None:
        """Prints the result of a run that had finished before."""
        _show(record.config, record.summary, record.folder, self.json)
        if changed := record.finished_metrics():
            say(changed)
        say(FINISHED)

    def _simulate(self, folder: Path) -> Run:
        from gradwire.experiment.run.record import Record
        from gradwire.experiment.simulate.simulation import resume, simulate

        def advice() -> str:
            return f"interrupted; resume: gradwire run --resume {folder}" * Record(folder).exists

        with stopping(advice) as signals, Meter() as meter:
            shown = meter.follow(folder.name)

            def progress(row: Row, steps: int) -> None:
                shown(row, steps)
                if signals.wanted:  # and its exception was lost
                    raise Interrupted(signals.wanted)

            if self.resume is not None:
                return resume(self.resume, progress, restart=self.restart, say=say)
            return simulate(self.config, out=folder, progress=progress)


def show_run(run: Run, folder: Path, as_json: bool) -> None:
    """Prints the result of a run."""
    _show(run.config, run.summary, folder, as_json)


def _show(config: Config, summary: Row, folder: Path, as_json: bool) -> None:
    if as_json:
        print(json.dumps(summary))
        return
    out.print(_run_table(config, summary))
    out.print(f"Records: {folder}", soft_wrap=True)


def _spread(summary: Row) -> str:
    """The accuracies of the workers' own models, under gossip."""
    if not has_spread(summary):
        return ""
    return f", the mean over the workers' own models, {format_spread(summary)}"


def _momentum(config: Config) -> str:
    """Where momentum acts, if not at the usual place."""
    return ", momentum before compression" if config.momentum_at == "before" else ""


def _run_table(config: Config, summary: Row) -> Table:
    times = _simulated(config, summary) if config.engine == "simulator" else _real(summary)
    table = Table(show_header=False, box=None)
    lines = {
        "task": f"{config.model} on {config.data}, {summary['parameters']:,} parameters",
        "method": f"{config.compression} | {config.synchronization} | {config.architecture} | "
        f"{config.scheduling}",
        "optimizer": f"{config.optimizer}{_momentum(config)}",
        "workers": f"{config.workers} x batch {config.batch_size}, {summary['steps']} steps",
        f"test {score_name(summary)}": f"{format_score(summary, 2)}{_spread(summary)}",
        "bytes sent": f"{format_bytes(summary['bytes_sent'])} in {summary['messages_sent']:,} "
        "messages, "
        f"{format_bytes(summary['bytes_per_worker_step'])} per worker and step{_nominal(summary)}"
        f"{', ' + headers if (headers := counted_headers(config.architecture)) else ''}",
        **times,
        **_observed(config, summary),
        **_compared(summary),
        **({"one worker after another": why} if (why := summary.get("evaluation_reason")) else {}),
        **({"dropped steps": str(n)} if (n := summary["dropped_steps"]) else {}),
        "wall time": f"{summary['wall_time_s']:.1f} s with {summary['kernels']} kernels",
    }
    for name, value in lines.items():
        table.add_row(name, value)
    return table


def _nominal(summary: Row) -> str:
    """The bytes of native means are not counted; those of this package's all-reduce are shown."""
    return " (computed for native means, not counted)" if summary.get("native_means") else ""


def _simulated(config: Config, summary: Row) -> dict[str, str]:
    """Lines about virtual time."""
    from gradwire.experiment.costs.coding_costs import describe_charge

    times = {config.bandwidth: summary["virtual_time_s"], **summary["virtual_times_s"]}
    names = network_names(list(times))
    return {
        **{f"virtual time at {name}": format_seconds(s) for name, s in zip(names, times.values())},
        "compute time": f"{config.compute} per gradient{_measured(summary)}",
        "coding time": describe_charge(summary["coding"]),
    }


def _measured(summary: Row) -> str:
    """How the time of a gradient was measured, if it was."""
    found = summary["compute_measured"]
    if found is None:
        return ""
    more = found["median_s"] / found["seconds"] - 1 if found["seconds"] else 0.0
    threads = "1 thread" if found["threads"] == 1 else f"{found['threads']} threads"
    return (
        f", measured on {threads}: fastest of {found['repeats']}, the middle one took "
        f"{100 * more:.0f}% longer"
    )


def _rates(summary: Row) -> dict[str, str]:
    """The training time: per step if workers step together, else gradients per second."""
    total = summary["training_time_s"]
    if summary.get("in_step", True):
        each = format_seconds(summary["step_time_s"])
        return {"time of training": f"{format_seconds(total)}, {each} per step of all workers"}
    rate = max(1, summary["gradients"]) / total
    return {
        "time of training": f"{format_seconds(total)} on the slowest node, {rate:.3g} gradients "
        "per second of all workers together"
    }


def _shares(summary: Row) -> dict[str, str]:
    """The parts of the time of a worker's step, or gradient; their sum is that time."""
    parts = {
        "gradients": summary["compute_time_s"],
        "coding and updates": sum(summary["call_time_s"].values()),
        "waiting": summary["wait_time_s"],
    }
    in_step, whole = summary.get("in_step", True), ""
    steps = summary["steps"] if in_step else max(1.0, summary["steps_timed"])
    if "worker_time_s" in summary:  # not in records of older versions
        total = summary["worker_time_s"]
        parts["sending and the rest"] = max(0.0, total - sum(parts.values()))
        whole = f"{format_seconds(total / steps)}: "
    shares = ", ".join(f"{name} {format_seconds(s / steps)}" for name, s in parts.items())
    what = "of a step" if in_step else "of a gradient"
    return {what: f"{whole}{shares} (mean of the workers)"}


def _real(summary: Row) -> dict[str, str]:
    """Lines about measured time, and bytes with the frames of the transport."""
    framed = format_bytes(summary["bytes_handed_over"])
    if summary["native_means"]:
        framed = "not known: means are the transport's own all-reduce"
    lines = {"bytes with framing": framed, **_rates(summary), **_shares(summary)}
    if summary["server_call_time_s"]:
        each = sum(summary["server_call_time_s"].values()) / max(1, summary["gradients"])
        lines["of a push"] = f"coding and updates {format_seconds(each)} on a server"
    lines["threads"] = f"{summary['threads']} on each rank"
    if summary["resumed_from_servers"]:
        lines["resumed"] = "figures are those since then"
    elif summary["resumed"]:
        steps_of = ", ".join(map(str, summary["resumed"]))
        lines["resumed"] = f"from step {steps_of}; later steps of the interrupted run do not count"
    if summary["servers_restarted"]:
        lines["servers restarted"] = ", ".join(map(str, summary["servers_restarted"]))
    return lines


def _compared(summary: Row) -> dict[str, str]:
    """Whether a replay ended in the same bits."""
    if "replay_differs" not in summary:
        return {}
    differs = ", ".join(summary["replay_differs"])
    return {"as it was": f"no: {differs}" if differs else f"yes: {summary['replay_compared']}"}


_UNITS = {  # of what methods note
    "staleness": " updates between the model of a gradient and its own",
    "ahead": " steps ahead of the slowest",
    "gradients": " in a step",
    "uploads": " per worker",
}


def _observed(config: Config, summary: Row) -> dict[str, str]:
    """Lines that only some runs have: graph, distance of models, staleness, lost workers."""
    from gradwire.architecture import ARCHITECTURE
    from gradwire.experiment.simulate.losses import describe_loss

    lines = ARCHITECTURE.parse(config.architecture).describe(config.workers)
    if summary["distance"]:
        lines["distance of models"] = f"{summary['distance']:.3g} (root mean square, to their mean)"
    for name, figures in summary["noted"].items():
        most = figures["max"]
        lines[name] = f"{figures['mean']:.3g} on average, at most {most:.0f}{_UNITS.get(name, '')}"
    for lost in summary["lost"]:
        name = f"worker {lost['rank']} lost"
        lines[name] = (
            f"{lines[name]}\n{describe_loss(lost)}" if name in lines else describe_loss(lost)
        )
    return lines
