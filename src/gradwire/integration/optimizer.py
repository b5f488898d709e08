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

import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from gradwire.core.codec import Compression
from gradwire.core.protocols import Scheduling
from gradwire.integration.buckets import BucketExchange
from gradwire.integration.collectives import Average, Sum, check_op
from gradwire.integration.communicator import Communicator, communicator_of
from gradwire.integration.exchange import Exchange
from gradwire.integration.names import check_rules, check_trained, check_whole, named_tensors
from gradwire.integration.pushing import Pushed, PushedSteps
from gradwire.integration.saved_states import checked_states
from gradwire.integration.servers import communicator_with_servers, find_servers
from gradwire.integration.settings import STATE_KEY, Settings
from gradwire.integration.stats import Stats
from gradwire.scheduling import SCHEDULING
from gradwire.warning import GradwireWarning


class _Distributed(Optimizer):
    """What a distributed optimizer has besides the class of the user's optimizer."""

    _buckets: BucketExchange
    _rebuild: Callable[[], BucketExchange]
    _compression: Compression
    _known: Container[int] | None  # the ids of parameters that have names; None: all get one
    _named: Any  # keeps these parameters, so that no other one gets the id of one that is gone
    _loaded: Any

    def synchronize(self) -> None:
        """Exchanges gradients that have not been, after fewer backward passes than were agreed."""
        self._buckets.check_complete()
        if self._buckets.has_unsent:
            self._buckets.finish()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """For code written for Horovod: gradients are averaged already."""
        yield

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        params = param_group["params"]
        if not isinstance(params, set):  # which torch refuses
            params = [params] if isinstance(params, Tensor) else list(params)
        param_group = {**param_group, "params": params}
        bare = [item[1] if isinstance(item, tuple) else item for item in params]  # of names
        number = len(self.param_groups)
        check_whole((f"parameter {place} of group {number}", p) for place, p in enumerate(bare))
        if self._known is not None:
            missing = sum(id(parameter) not in self._known for parameter in bare)
            if missing:
                raise ValueError(
                    f"{missing} of the {len(params)} parameters of the group were not in "
                    "named_parameters, so they would differ from rank to rank. Give the names of "
                    "all parameters to gradwire.DistributedOptimizer, or none"
                )
        super().add_param_group(param_group)
        old = self._buckets
        old.remove()
        self._buckets = self._rebuild()
        self._buckets.take_over(old)

    @property
    def scheduling(self) -> str:
        """The schedule; with the groups that were decided on, once they are."""
        return repr(self._buckets.scheduling)

    def stats(self) -> Stats:
        """What was sent so far, and what that took."""
        return self._buckets.meter.stats()

    def state_dict(self) -> dict[str, Any]:
        """That of the optimizer, and what compression keeps on this rank: residuals, momenta."""
        exchange = self._buckets.exchange
        own = self._loaded or {} if exchange is None else exchange.state_dict()
        return {**super().state_dict(), STATE_KEY: own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """That of this rank; "gradwire" in it may be the list of those of all ranks."""
        saved = state_dict.get(STATE_KEY)
        rows = checked_states(saved, self._compression) if saved else []
        rest = {name: value for name, value in state_dict.items() if name != STATE_KEY}
        super().load_state_dict(rest)
        if not rows:
            return
        if self._buckets.exchange is None:
            self._loaded = saved
        else:
            self._buckets.exchange.load_state_dict(rows)


def _before_step(
    optimizer: _Distributed, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The hook before a step: averages gradients that have not been. A closure averages its own.

    It is a hook since schedulers of the learning rate keep the `step` that was there before.
    """

    def average() -> None:
        optimizer.synchronize()
        check_trained(optimizer, optimizer._buckets)

    own, *rest = args
    closure = rest[0] if rest else kwargs.get("closure")
    if closure is None:
        average()
        return args, kwargs

    def averaged() -> Any:
        loss = closure()
        average()
        return loss

    if rest:
        return (own, averaged, *rest[1:]), kwargs
    return args, {**kwargs, "closure": averaged}


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: str | Compression = "identity",
    *,
    scheduling: str = "fusion",
    synchronization: str = "bsp",
    architecture: str = "allreduce",
    backward_passes_per_step: int = 1,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    sparse_as_dense: bool = False,
    process_group: dist.ProcessGroup | None = None,
    seed: int = 0,
    steps_per_epoch: float | None = None,
    timeout_s: float = 300.0,
    native: bool = True,
    scaler: GradScaler | None = None,
) -> Any:
    """The optimizer, which from now on takes steps on gradients averaged over all ranks.

    `named_parameters`: of the model, with those of groups that are added later.
    `backward_passes_per_step`: gradients of so many backward passes add up before they
    are exchanged. With `architecture="parameter_server(2)"` servers form the means, or, with
    `synchronization="ssp(3)"` and "asp", hold the model (`gradwire launch`). `op`: Average, or
    Sum, which is the mean times the number of ranks. `gradient_predivide_factor`: accepted from
    scripts of Horovod, where it changes rounding only; not used. Other settings are those of
    `ddp_comm_hook`.
    """
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"optimizer is one of torch.optim, got a {type(optimizer).__name__}")
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step is at least 1, got {backward_passes_per_step}")
    check_op(op)
    if gradient_predivide_factor != 1.0 and (op != Average or gradient_predivide_factor <= 0):
        raise ValueError(
            "gradient_predivide_factor is positive, and for op=Average, got "
            f"{gradient_predivide_factor} with op={op!r}"
        )
    schedule = _schedule(scheduling)
    settings = Settings.parse(
        compression,
        architecture,
        seed,
        steps_per_epoch,
        synchronization,
        may_have_servers=True,
    )
    if settings.num_servers:
        find_servers(settings)  # before anybody waits for them
        if process_group is not None:
            raise ValueError(
                f"{settings.architecture!r} is used by all workers of the job: leave out "
                "process_group"
            )
        if schedule.needs_prices:
            raise ValueError(
                f"scheduling={scheduling!r} measures exchanges among workers, not with servers: "
                "write its groups, mgwfbp((2, 5)), or take fusion"
            )
    if op == Sum and not settings.synchronization.pauses:
        raise ValueError(
            f"op=Sum with synchronization={synchronization!r}: workers push changes of the model "
            "there, not gradients to be summed. Leave op out, or take bsp"
        )
    named = None if named_parameters is None else named_tensors(named_parameters)
    names = _names(optimizer, named)
    check_whole(
        (names.get(id(p), f"parameter {place} of group {number}"), p)
        for number, group in enumerate(optimizer.param_groups)
        for place, p in enumerate(group["params"])
    )
    check_rules(settings.compression, list(names.values()) or None)
    kind = type(optimizer)
    if issubclass(kind, _Distributed | Pushed):
        raise ValueError("this optimizer is distributed already")

    def make_communicator(device: torch.device) -> Communicator:
        if settings.num_servers:
            return communicator_with_servers(settings, timeout_s=timeout_s, device=device)
        return communicator_of(process_group, timeout_s=timeout_s, native=native, device=device)

    def make_exchange(device: torch.device) -> Exchange:
        communicator = make_communicator(device)
        exchange = Exchange(communicator, settings, communicator.new_label(), scaler)
        if made._loaded:
            exchange.load_state_dict(made._loaded)
        return exchange

    def exchanged() -> list[tuple[str, Tensor]]:
        return [
            (names.setdefault(id(parameter), f"parameter {len(names)}"), parameter)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
            and parameter.numel()  # else there is nothing to average
            and (named is None or id(parameter) in names)
        ]

    def make_buckets() -> BucketExchange:
        return BucketExchange(
            exchanged(),
            schedule,
            make_exchange,
            num_passes=backward_passes_per_step,
            densifies=sparse_as_dense,
            sums=op == Sum,
        )

    made: Any = optimizer
    if not settings.synchronization.pauses:
        steps = PushedSteps(exchanged(), settings, repr(schedule), make_communicator)
        made.__class__ = type(f"Distributed{kind.__name__}", (Pushed, kind), {})
        made._steps = steps
        steps.hook(made)
        return made
    made.__class__ = type(f"Distributed{kind.__name__}", (_Distributed, kind), {})
    made._loaded = None
    made._compression = settings.compression
    made._known = None if named is None else names
    made._named = named
    made._rebuild = make_buckets
    made._buckets = make_buckets()
    made.register_step_pre_hook(_before_step)
    return made


def _schedule(text: str) -> Scheduling:
    schedule = SCHEDULING.parse(text)
    if schedule.overlaps_forward:
        raise ValueError(
            f"scheduling={text!r}: the next forward pass starts when step() has updated all "
            "parameters. Take sequential, wfbp, fusion or mgwfbp."
        )
    return schedule


def _names(optimizer: Optimizer, named: Sequence[tuple[str, Tensor]] | None) -> dict[int, str]:
    """Names by parameter. Without any, they are numbered in the order of the optimizer."""
    if named is None:
        return {}
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"named_parameters has these names more than once: {', '.join(twice)}")
    if names and all(name.startswith("module.") for name in names):
        warnings.warn(
            'the names of parameters begin with "module.": if the model is under '
            "DistributedDataParallel, gradients are averaged twice. Give the module inside it, or "
            "keep DDP and register gradwire.ddp_comm_hook",
            GradwireWarning,
            stacklevel=3,
        )
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
