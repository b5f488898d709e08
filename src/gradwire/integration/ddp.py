"""Compression under DistributedDataParallel, by its communication hook.

    model = DistributedDataParallel(model)
    model.register_comm_hook(*gradwire.ddp_comm_hook("ef(topk(0.01) >> fp16)"))

DDP hands over a bucket of gradients when all of them are there, and goes on with the backward pass;
the communicator's thread exchanges it meanwhile. At the end of the backward pass all means are
there. An error of an exchange is raised by `backward()`, as it is.

DDP's hook does not tell the names of parameters, which compressions that choose by name need. See
`bucket_names.py`.
"""

import time
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.autograd import Variable

from gradwire.core.codec import Compression
from gradwire.integration.bucket_names import NUMBERED, BucketNames
from gradwire.integration.buckets import check_outermost
from gradwire.integration.communicator import communicator_of
from gradwire.integration.exchange import Exchange
from gradwire.integration.names import check_rules, named_tensors, rows_of
from gradwire.integration.saved_states import checked_states
from gradwire.integration.settings import Settings
from gradwire.integration.stats import Meter, Stats

Hook = Any


class DDPState:
    """The state of the hook: what it exchanges and what that took."""

    def __init__(
        self,
        settings: Settings,
        group: dist.ProcessGroup | None,
        named_parameters: Iterable[tuple[str, Tensor]] | None,
        timeout_s: float,
        native: bool,
        scaler: GradScaler | None,
    ) -> None:
        self._settings, self._group = settings, group
        self._scaler = scaler
        self._timeout_s, self._native = timeout_s, native
        named = None if named_parameters is None else named_tensors(named_parameters)
        # Compared before the first mean: of later buckets nothing is.
        self._parameters = (
            None if named is None else rows_of((n, p) for n, p in named if p.requires_grad)
        )
        names = None if self._parameters is None else [str(row[0]) for row in self._parameters]
        check_rules(settings.compression, names)
        self._names = BucketNames(named)
        self._exchange: Exchange | None = None
        self._loaded: Any = None
        self._pending: list[Future[Tensor]] = []
        self._indices: set[int] = set()  # of the buckets in this backward pass
        self._has_repeated = False  # a bucket, in one backward pass
        self._meter = Meter()

    def stats(self) -> Stats:
        """What the hook has sent so far, and what that took."""
        return self._meter.stats()

    def state_dict(self) -> dict[str, Any]:
        """What this rank keeps from step to step: residuals, momenta. Every rank has its own."""
        if self._exchange is None:
            return self._loaded or {}
        return {**self._exchange.state_dict(), NUMBERED: self._names.saved()}

    def load_state_dict(self, saved: Any) -> None:
        """Continues from a saved state of the same rank, or from those of all ranks as a list."""
        rows = checked_states(saved, self._settings.compression)
        if not rows:
            return
        self._names.check(rows)
        if self._exchange is None:
            self._loaded = saved
        else:
            self._exchange.load_state_dict(saved)
        self._names.expect(rows)  # last: nothing is expected of a state that was refused

    def run(self, bucket: dist.GradBucket) -> "torch.futures.Future[Tensor]":
        """The hook of DDP."""
        if torch._C._current_graph_task_id() == -1:
            raise RuntimeError(
                "DDP exchanges a bucket outside of a backward pass, as in model.join(), with which "
                "this hook does not work: let all ranks take the same number of steps"
            )
        x = bucket.buffer()
        if x.is_sparse:
            raise ValueError(
                f"the gradient of a parameter of {list(x.shape)} is sparse, and compression works "
                "on dense ones. Make the layer with sparse=False, or leave out DDP and take "
                "gradwire.DistributedOptimizer(..., sparse_as_dense=True)"
            )
        exchange = self._exchange_on(x.device)
        result: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[x.device] if x.is_cuda else []
        )
        if bucket.index() in self._indices:
            self._has_repeated = True
            Variable._execution_engine.queue_callback(self._finish)  # raises
            result.set_result(x)
            return result
        try:
            tensors = self._names.layout(bucket)
        except ValueError:  # this backward pass ends here; the next one begins anew
            self._pending.clear()
            self._indices.clear()
            raise
        if not self._pending:  # the first bucket of a backward pass
            check_outermost()
            Variable._execution_engine.queue_callback(self._finish)
        self._indices.add(bucket.index())
        after = None
        if x.is_cuda:
            after = torch.cuda.current_stream(x.device).record_event()
        name = f"bucket {bucket.index()}"
        future = exchange.mean(name, tensors, x, is_last=bucket.is_last(), after=after)
        self._pending.append(future)
        self._meter.add_bucket(x)

        def done(future: "Future[Tensor]") -> None:
            # After an error `_finish` raises, and the value is not used.
            result.set_result(x if future.exception() is not None else future.result())

        future.add_done_callback(done)
        return result

    def _exchange_on(self, device: torch.device) -> Exchange:
        if self._exchange is None:
            communicator = communicator_of(
                self._group, timeout_s=self._timeout_s, native=self._native, device=device
            )
            made = Exchange(communicator, self._settings, communicator.new_label(), self._scaler)
            if self._loaded:
                made.load_state_dict(self._loaded)  # raises again until another one is loaded
            made.agree_on({"parameters": self._parameters})
            self._meter.begin(communicator, made.label)
            self._exchange = made
        return self._exchange

    def _finish(self) -> None:
        """At the end of the backward pass, before DDP uses the means."""
        pending, self._pending = self._pending, []
        self._indices.clear()
        began = time.perf_counter()
        with torch.profiler.record_function("gradwire: wait"):
            for future in pending:
                future.result()  # raises what went wrong
        if self._has_repeated:
            raise RuntimeError(
                "a bucket came twice before a backward pass had ended. Is this hook registered "
                "with several models? Call gradwire.ddp_comm_hook once for each. Or did an earlier "
                "backward pass fail? Then start again from a checkpoint"
            )
        assert self._exchange is not None
        self._exchange.finish_step()
        self._names.end_pass()
        self._meter.add_step(time.perf_counter() - began)


# DDP looks at these annotations.
def _hook(state: DDPState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return state.run(bucket)


def ddp_comm_hook(
    compression: str | Compression,
    *,
    architecture: str = "allreduce",
    process_group: dist.ProcessGroup | None = None,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    seed: int = 0,
    steps_per_epoch: float | None = None,
    timeout_s: float = 300.0,
    native: bool = True,
    scaler: GradScaler | None = None,
) -> tuple[DDPState, Hook]:
    """State and hook for `DistributedDataParallel.register_comm_hook`.

    `process_group`: the one that DDP got, if any. `timeout_s`: how long nothing may happen while
    this rank waits for others. `native`: values that can be added on the way (`identity`, `fp16`,
    `randomk`) are averaged by gloo's all-reduce, float16 in its own precision as by torch's hook;
    without it by messages, with the simulator's bits. `scaler`: the GradScaler that losses are
    multiplied by, if any.
    """
    settings = Settings.parse(compression, architecture, seed, steps_per_epoch)
    state = DDPState(settings, process_group, named_parameters, timeout_s, native, scaler)
    return state, _hook
