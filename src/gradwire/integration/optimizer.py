"""`DistributedOptimizer`: any torch optimizer, on gradients averaged over all ranks.

    optimizer = gradwire.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression="ef(sign)"
    )

The convention of Horovod and BytePS (Sergeev and Del Balso 2018; Peng et al. 2019). Gradients leave
while the backward pass runs, and are averaged when `backward()` returns; so they can be clipped or
unscaled before `step()` without further calls. (In Horovod that needs `synchronize()` and
`skip_synchronize()`, which are here, too.)

The optimizer that was given is changed, not copied: schedulers that hold it continue to work.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from gradwire.core.codec import Compression
from gradwire.core.protocols import Scheduling
from gradwire.integration.buckets import BucketExchange
from gradwire.integration.communicator import communicator_of
from gradwire.integration.exchange import Exchange
from gradwire.integration.settings import Settings
from gradwire.integration.stats import Stats
from gradwire.scheduling import SCHEDULING

_KEY = "gradwire"  # in the state_dict


class _Distributed(Optimizer):
    """What a distributed optimizer has besides the class of the user's optimizer."""

    _buckets: BucketExchange
    _rebuild: Callable[[], BucketExchange]
    _loaded: Any

    def step(self, closure: Any = None) -> Any:
        if closure is None and self._buckets.has_unsent:
            self._buckets.finish()
        return super().step(closure)

    step.hooked = True  # type: ignore[attr-defined]  # hooks of a step run in that of the base class

    def synchronize(self) -> None:
        """Exchanges gradients that have not been, after fewer backward passes than were agreed."""
        if self._buckets.has_unsent:
            self._buckets.finish()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """For code written for Horovod: gradients are averaged already."""
        yield

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        old = self._buckets
        old.remove()
        self._buckets = self._rebuild()
        self._buckets.exchange, self._buckets.meter = old.exchange, old.meter

    def stats(self) -> Stats:
        """What was sent so far, and what that took."""
        return self._buckets.meter.stats()

    def state_dict(self) -> dict[str, Any]:
        """That of the optimizer, and what compression keeps on this rank: residuals, momenta."""
        own = {} if self._buckets.exchange is None else self._buckets.exchange.state_dict()
        return {**super().state_dict(), _KEY: own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """That of this rank; "gradwire" in it may be the list of those of all ranks."""
        rest = {name: value for name, value in state_dict.items() if name != _KEY}
        super().load_state_dict(rest)
        saved = state_dict.get(_KEY)
        if not saved:
            return
        if self._buckets.exchange is None:
            self._loaded = saved
        else:
            self._buckets.exchange.load_state_dict(saved)


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: str | Compression = "identity",
    *,
    scheduling: str = "fusion",
    synchronization: str = "bsp",
    architecture: str = "allreduce",
    backward_passes_per_step: int = 1,
    sparse_as_dense: bool = False,
    process_group: dist.ProcessGroup | None = None,
    seed: int = 0,
    steps_per_epoch: float | None = None,
    timeout_s: float = 300.0,
    native: bool = True,
) -> Any:
    """The optimizer, which from now on takes steps on gradients averaged over all ranks.

    `named_parameters`: of the model; parameters of the optimizer that are not among them are not
    exchanged. `backward_passes_per_step`: gradients of so many backward passes add up before they
    are exchanged. Other settings are those of `ddp_comm_hook`.
    """
    if synchronization != "bsp":
        raise ValueError(
            f"synchronization={synchronization!r}: a DistributedOptimizer averages gradients in "
            'every step, "bsp"'
        )
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step is at least 1, got {backward_passes_per_step}")
    schedule = _schedule(scheduling)
    settings = Settings.parse(compression, architecture, seed, steps_per_epoch)
    names = _names(optimizer, named_parameters)
    kind = type(optimizer)
    if issubclass(kind, _Distributed):
        raise ValueError("this optimizer is distributed already")

    def make_exchange(device: torch.device) -> Exchange:
        communicator = communicator_of(
            process_group, timeout_s=timeout_s, native=native, device=device
        )
        exchange = Exchange(communicator, settings, communicator.new_label())
        if made._loaded:
            exchange.load_state_dict(made._loaded)
        return exchange

    def make_buckets() -> BucketExchange:
        named = [
            (names.setdefault(id(parameter), f"parameter {len(names)}"), parameter)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad and (named_parameters is None or id(parameter) in names)
        ]
        return BucketExchange(
            named,
            schedule,
            make_exchange,
            num_passes=backward_passes_per_step,
            densifies=sparse_as_dense,
        )

    made: Any = optimizer
    made.__class__ = type(f"Distributed{kind.__name__}", (_Distributed, kind), {})
    made._loaded = None
    made._rebuild = make_buckets
    made._buckets = make_buckets()
    return made


def _schedule(text: str) -> Scheduling:
    schedule = SCHEDULING.parse(text)
    why = None
    if schedule.overlaps_forward:
        why = "the next forward pass starts when step() has updated all parameters"
    elif schedule.needs_prices:
        why = "nothing has measured what exchanges cost here. Write mgwfbp(groups=(...))"
    if why is not None:
        raise ValueError(f"scheduling={text!r}: {why}. Take sequential, wfbp or fusion.")
    return schedule


def _names(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> dict[int, str]:
    """Names by parameter. Without any, they are numbered in the order of the optimizer."""
    if named_parameters is None:
        return {}
    named = list(named_parameters)
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"named_parameters has these names more than once: {', '.join(twice)}")
    known = {id(parameter): name for name, parameter in named}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    missing = sum(id(parameter) not in known for parameter in params)
    if missing:
        raise ValueError(
            f"{missing} of the {len(params)} parameters of the optimizer are not in "
            "named_parameters, so they would differ from rank to rank. Give the names of all, or "
            "none"
        )
    return known
