"""Runs an experiment as one rank of torch.distributed's process group; all ranks call `run`.

This is for architectures without servers; `served.py` has the others. What a rank does is in
`node/run.py`.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gradwire.core.errors import DataError, LostError, RefusedError
from gradwire.experiment.processes.headers import HEADERS
from gradwire.experiment.processes.launch.signals import Interrupted, Signals
from gradwire.experiment.processes.node.run import NodeRun
from gradwire.experiment.processes.node.types import RunFolder
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.given import NOTHING, Given, given_again, split_given
from gradwire.experiment.run.machine import default_threads, layout_of, own_device
from gradwire.experiment.run.outcome import Progress, Run, config_of, use_threads
from gradwire.experiment.run.record import Record, Say, warn
from gradwire.experiment.run.setup import Experiment, prepare
from gradwire.runtime.network.network import parse_duration
from gradwire.runtime.process.accelerator import nccl_groups
from gradwire.runtime.process.gloo import GlooTransport

N = TypeVar("N", bound=NodeRun)


def run(
    config: Config | None = None,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    progress: Progress | None = None,
    checkpoint_every: str = "30s",
    timeout: str = "300s",
    is_restart: bool = False,
    restart: bool = False,
    say: Say = warn,
    signals: Signals | None = None,
    **settings: Any,
) -> Run:
    """Trains as one rank of torch.distributed's process group; all ranks call it alike.

        torch.distributed.init_process_group("gloo")
        run = gradwire.run(workers=4, compression="ef(topk(0.01))", out="runs/first")

    `settings` are the fields of `Config`; `model`, `data`, `loss`, `metric` and `collate` may be
    Python objects, as for `simulate`, and must then be alike on all ranks. With `out` the record of
    the run is written there, and every rank writes checkpoints: at evaluations, and every
    `checkpoint_every`. `resume` continues the run in that folder, to the same bits as if it had not
    been interrupted; so does `out` if `is_restart` and the folder holds this run. `restart` allows
    a resumed run to begin again from step 0 if its checkpoints are damaged or missing. `say` gets
    messages on rank 0: that the run begins again, and which files were not used; by default these
    are warnings. `timeout` is how long nothing may happen before a rank gives up.
    """
    if not dist.is_initialized():
        raise ValueError(
            "gradwire.run is called on every rank of a process group, and there is none: call "
            "torch.distributed.init_process_group first, or gradwire run --engine process"
        )
    if resume is not None:
        if config is not None or out is not None:
            raise ValueError("resume continues with the run's own settings; give no others")
        chosen = Record.open(Path(resume)).config
        given = given_again(chosen, settings)
    else:
        texts, given = split_given(settings)
        chosen = config_of(config, {**texts, "engine": "process"}, "run")
    folder = out if resume is None else resume
    place = None if folder is None else Path(folder)
    where = RunFolder(place, resume is not None, is_restart, restart)
    if chosen.record_order and chosen.native:
        raise ValueError("native means are not the simulator's: leave out native, or record_order")
    if chosen.record_order and where.folder is None:
        raise ValueError("record_order writes files into the record: give a folder, out=...")
    if chosen.record_spans and where.folder is None:
        raise ValueError("record_spans writes files into the record: give a folder, out=...")
    size = layout_of(chosen).size
    if dist.get_world_size() != size:
        raise ValueError(
            f"workers = {chosen.workers} on {chosen.architecture} makes {size} ranks, but there "
            f"are {dist.get_world_size()}"
        )
    every_s, timeout_s = parse_duration(checkpoint_every), parse_duration(timeout)
    if not timeout_s > 0:
        raise ValueError(f"timeout must be above 0, got {timeout!r}")
    options = {"signals": signals or Signals(), "progress": progress, "say": say}
    with (
        use_threads(chosen.threads or default_threads(size)),
        rank_of(NodeRun, chosen, where, every_s, timeout_s, given, **options) as node,
    ):
        return node.run()


@contextmanager
def rank_of(
    kind: type[N],
    config: Config,
    where: RunFolder,
    checkpoint_every_s: float,
    timeout_s: float,
    given: Given = NOTHING,
    **settings: Any,
) -> Iterator[N]:
    """This rank of the process group, with connections to the others."""
    device = own_device(config)
    payloads = nccl_groups(device) if config.device.startswith("cuda") else None
    transport = GlooTransport(headers=HEADERS, send_s=timeout_s, device=device, payloads=payloads)
    lost: int | None = transport.rank  # unless the run ends well
    try:
        yield kind(
            prepare_or_explain(config, transport.rank > 0, given),
            transport,
            layout_of(config),
            where,
            checkpoint_every_s=checkpoint_every_s,
            timeout_s=timeout_s,
            native=config.native,
            **settings,
        )
        lost = None
    except LostError as error:
        lost = error.rank
        raise
    except (RefusedError, Interrupted):  # all ranks stop
        lost = None
        raise
    finally:
        transport.close(lost)


def prepare_or_explain(config: Config, is_quiet: bool, given: Given = NOTHING) -> Experiment | str:
    """The experiment, or the reason why there is none, which all ranks must learn.

    `is_quiet`: no warnings; one rank prints them. From now on torch uses as many threads as the
    experiment says, until `use_threads` ends.
    """
    try:
        with warnings.catch_warnings():
            if is_quiet:
                warnings.simplefilter("ignore")
            experiment = prepare(config, given)
        torch.set_num_threads(experiment.config.threads or torch.get_num_threads())
        return experiment
    except (ValueError, DataError, OSError) as error:
        return str(error) or type(error).__name__
