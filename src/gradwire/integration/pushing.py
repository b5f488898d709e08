"""Steps of an optimizer whose model servers hold: `asp` and `ssp` for any torch optimizer.

In each step the worker takes the step of its own optimizer, pushes by how much its parameters
changed, through the compression, and continues with the model that the servers answer. What
servers do with a change is in `experiment/processes/loops/models.py`. The model at the start is
that of rank 0, and all workers are there then; later each goes at its own pace, and may end before
the others.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwire.compression.feedback.ef import warn_if_unfed
from gradwire.core.codec import is_finite
from gradwire.core.errors import NonFiniteError, WireError
from gradwire.core.node import Framed, Node
from gradwire.core.profile import Profile
from gradwire.core.protocols import Bucket, Replica
from gradwire.core.spec import Spec
from gradwire.core.wire import Failed
from gradwire.experiment.processes.loops.models import DESCRIBE, HELD, SHARD, plan_of
from gradwire.integration.buckets import Named
from gradwire.integration.communicator import Communicator
from gradwire.integration.exchange import compare, packed
from gradwire.integration.names import check_trained
from gradwire.integration.own_compressor import OwnCompressor
from gradwire.integration.saved_states import states_in
from gradwire.integration.servers import find_servers
from gradwire.integration.settings import STATE_KEY, Settings
from gradwire.integration.stats import Meter, Stats
from gradwire.training.client import ServerClient
from gradwire.training.plan import Plan


class PushedSteps:
    """Pushes the steps of one optimizer. All workers make theirs with the same settings."""

    def __init__(
        self,
        named: Named,
        settings: Settings,
        scheduling: str,
        make_communicator: Callable[[torch.device], Communicator],
    ) -> None:
        self.named = list(named)
        self.meter = Meter()
        self.num_steps = 0  # also those before a state was loaded
        self.saved: Mapping[str, Any] | None = None  # to continue from
        self._settings, self._scheduling = settings, scheduling
        self._make_communicator = make_communicator
        self._communicator: Communicator | None = None
        self._client: ServerClient | None = None
        self._plan: Plan | None = None
        self._replica: Replica | None = None
        self._first = 0  # the number of the first step since this was made
        self._before: Tensor | None = None  # the parameters, while a step is taken
        _check_parameters(self.named)
        if isinstance(settings.compression, OwnCompressor):
            raise ValueError(
                f"{settings.compression!r} averages what it compresses to, but with "
                f"{settings.synchronization!r} each worker pushes on its own. Take a compression "
                "of gradwire"
            )
        self._new_plan("", torch.zeros(0))  # refuses what does not go together

    def hook(self, optimizer: Optimizer) -> None:
        """Exchanges what each step of this optimizer changes. By hooks, since schedulers of the
        learning rate that it has keep its `step` as it is now."""
        known = {id(parameter) for _, parameter in self.named}
        optimizer.register_step_pre_hook(lambda *step: check_trained(optimizer, known))
        optimizer.register_step_pre_hook(lambda *step: self._before_step())
        optimizer.register_step_post_hook(lambda *step: self._after_step())

    def _before_step(self) -> None:
        if self._communicator is None:
            self._begin()
        self._before = self._flat()

    def _after_step(self) -> None:
        assert self._communicator is not None
        assert self._before is not None
        change, self._before = self._before.sub_(self._flat()), None
        self.meter.add_bucket(change)
        began = time.perf_counter()
        future = self._communicator.post_after(lambda node: self._exchange(change))
        self._write(self._communicator.wait(future))
        self.num_steps += 1
        self.meter.add_step(time.perf_counter() - began)

    def stats(self) -> Stats:
        return self.meter.stats()

    # The start.

    def _begin(self) -> None:
        """Checks that all workers have the same, and takes the model of rank 0."""
        params = self._flat()
        communicator = self._make_communicator(params.device)
        label = communicator.new_label()
        self._first = self.num_steps
        self._plan = self._new_plan(label, params)
        self._replica = self._plan.initial_replicas()[0]
        if self.saved is not None:
            self._replica = self._replica.having(exchange=tuple(self.saved["states"]))
        whole = self._plan.spec(Bucket("model", 0, params.numel()), params.dtype)
        warn_if_unfed(self._settings.compression, whole, stacklevel=4)
        future = communicator.post_after(lambda node: self._agree(node, label))
        self._write(communicator.wait(future))
        self._communicator = communicator
        self.meter.begin(communicator, label)

    def _new_plan(self, label: str, params: Tensor) -> Plan:
        return plan_of(self._describe(label), self._num_workers(), params if label else None)

    def _num_workers(self) -> int:
        return find_servers(self._settings)[0].num_workers

    def _describe(self, label: str) -> dict[str, Any]:
        tensors, place = [], 0
        for name, parameter in self.named:
            stop = place + parameter.numel()
            tensors.append([name, place, stop, list(parameter.shape)])
            place = stop
        return {
            **self._settings.described(),
            "scheduling": self._scheduling,
            "tensors": tensors,
            "dtype": str(self.named[0][1].dtype),
            "label": label,
            "step": self._first,
        }

    async def _agree(self, node: Node, label: str) -> Tensor:
        assert self._plan is not None
        assert self._replica is not None
        own, architecture = self._describe(label), self._plan.architecture
        # Without the step: workers that continue may have taken different numbers of steps.
        common = {name: value for name, value in own.items() if name != "step"}
        workers = range(self._num_workers())
        await compare(common, architecture.group(node, f"{label} settings"), workers)
        replica, shards = self._replica, self._plan.shards()
        pieces = []
        for number, shard in enumerate(shards):
            if node.rank == 0:
                await node.send(node.size + number, DESCRIBE, packed(own), "model")
                piece = replica.params[shard.start : shard.stop]
                await node.send(node.size + number, SHARD, piece, "model")
        for number, shard in enumerate(shards):
            answer: Any = await node.recv(node.size + number, HELD)
            if isinstance(answer, Framed) and isinstance(answer.header, Failed):
                raise answer.header.error()
            expected = replica.params[shard.start : shard.stop]
            if node.rank == 0:
                answer = expected
            if not isinstance(answer, Tensor) or Spec.of(answer) != Spec.of(expected):
                raise WireError(f"server {number} answered {answer!r:.200}, expected a shard")
            pieces.append(answer)
        params = torch.cat(pieces)
        replica = replica.having(params=params)
        if self._plan.compresses_answers:
            replica = replica.remembering(pulled=params)
        self._replica = replica
        self._client = ServerClient(self._plan, node, 0.0, label)
        return params

    # A step.

    async def _exchange(self, change: Tensor) -> Tensor:
        client, replica, plan = self._client, self._replica, self._plan
        assert client is not None
        assert replica is not None
        assert plan is not None
        step = self.num_steps - self._first
        if not await client.node.call(is_finite, change):
            where = int((~torch.isfinite(change)).nonzero()[0])
            raise NonFiniteError(
                f"NaN or infinity in the update of {plan.tensor_at(where)} on rank "
                f"{client.node.rank} in step {step}. Lower the learning rate, or scale losses "
                "with a GradScaler, which leaves out such steps"
            )
        pending = _Change(client.node, plan.profile, change)
        pushed = await client.push(pending, replica, step, wants_answer=True)
        pulled = await client.receive_model(pushed, replica.exchange)
        self._replica = pulled.replica
        return pulled.replica.params

    def _flat(self) -> Tensor:
        """The parameters, as a new vector."""
        return torch.cat([parameter.detach().reshape(-1) for _, parameter in self.named])

    @torch.no_grad()
    def _write(self, params: Tensor) -> None:
        place = 0
        for _, parameter in self.named:
            stop = place + parameter.numel()
            parameter.copy_(params[place:stop].view(parameter.shape))
            place = stop

    # State.

    def state_dict(self) -> dict[str, Any]:
        """What this worker keeps from step to step."""
        if self._replica is None or self._communicator is None:
            return dict(self.saved or {})
        return {
            "version": 1,
            **self._same(),
            "rank": self._communicator.rank,
            "size": self._communicator.size,
            "step": self.num_steps,
            "states": list(self._replica.exchange),
        }

    def checked(
        self, saved: "Mapping[str, Any] | Sequence[Mapping[str, Any]]"
    ) -> Mapping[str, Any]:
        """What this worker saved, of the states of all if it is a list; refuses other states."""
        if self._communicator is not None:
            raise ValueError("load the state before the first step: servers hold the model then")
        job, own = find_servers(self._settings)
        rows = states_in(saved)
        row = next((row for row in rows if row.get("rank") == own), rows[0])
        expected = {"version": 1, **self._same(), "rank": own, "size": job.num_workers}
        for name, value in expected.items():
            if row.get(name) != value:
                raise ValueError(
                    f"the saved state has {name} = {row.get(name)}, this worker {value}: what "
                    "compression keeps belongs to one worker and to the shards of the servers. "
                    "Load it with the same settings, or start without it"
                )
        return row

    def take(self, row: Mapping[str, Any]) -> None:
        """Continues from what this worker saved."""
        self.saved, self.num_steps = row, row["step"]

    def _same(self) -> dict[str, Any]:
        described = self._settings.described()
        names = ("compression", "synchronization", "architecture")
        return {name: described[name] for name in names}


class _Change:
    """A change of the model that is complete, in place of a backward pass."""

    was_dropped = False

    def __init__(self, node: Node, profile: Profile, x: Tensor) -> None:
        self.node, self.profile, self._x = node, profile, x

    async def whole(self) -> Tensor:
        return self._x

    async def ready(self, bucket: Bucket) -> Tensor:
        return self._x[bucket.start : bucket.stop]


class Pushed(Optimizer):
    """What a distributed optimizer has whose model servers hold."""

    _steps: PushedSteps

    def synchronize(self) -> None:
        """For code written for Horovod: gradients are not averaged."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """For code written for Horovod: gradients are not averaged."""
        yield

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ValueError(
            "servers hold the parameters that this optimizer had when it became distributed: add "
            "all groups before gradwire.DistributedOptimizer"
        )

    def stats(self) -> Stats:
        """What was sent so far, and what that took."""
        return self._steps.stats()

    def state_dict(self) -> dict[str, Any]:
        """That of the optimizer, and what compression keeps on this rank: residuals, momenta."""
        return {**super().state_dict(), STATE_KEY: self._steps.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """That of this rank, before the first step."""
        saved = state_dict.get(STATE_KEY)
        row = self._steps.checked(saved) if saved else None  # before anything is loaded
        super().load_state_dict({n: v for n, v in state_dict.items() if n != STATE_KEY})
        if row is not None:
            self._steps.take(row)


def _check_parameters(named: Named) -> None:
    kinds = sorted({f"{p.dtype} on {p.device}" for _, p in named})
    if len(kinds) != 1:
        raise ValueError(
            f"the parameters are {', '.join(kinds) or 'none'}: servers hold a model whose "
            "parameters have one type and lie on one device"
        )
    if not named[0][1].is_floating_point():
        raise ValueError(f"the parameters are {kinds[0]}: only real floats can be exchanged")
