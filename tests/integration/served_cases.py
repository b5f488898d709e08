"""What the workers of test_served.py run, in jobs with two servers."""

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.experiment.run import setup
from gradwire.experiment.run.config import Config
from gradwire.models.base import build_seeded
from gradwire.models.mlp import MLP
from integration.loops import flat, is_same_everywhere, loss_of, make_model, sgd, train

SIZE, NUM_SERVERS = 2, 2
PS = "parameter_server(2)"
GOLDEN: dict[str, Any] = {
    "workers": SIZE,
    "model": "mlp((8,))",
    "batch_size": 4,
    "steps": 5,
    "optimizer": "sgd(0.1)",
    "evaluation": "sequential",
    "threads": 1,
}
METHODS = (
    ("identity", PS, "sequential"),
    ("fp16", PS, "wfbp"),
    ("ef(sign)", PS, 'sequential("layer")'),
    ("ef(topk(0.01))", PS, "fusion(3000, first=500)"),
    ("ef(topk(0.1))", 'parameter_server(2, answers="compressed")', "wfbp"),
    ("qsgd(bits=4)", PS, "wfbp"),
    ("powersgd(1)", PS, "wfbp"),
)
PUSHED = ("identity", "fp16", "ef(sign)", "ef(topk(0.1))", "qsgd(bits=4)")


def distributed(model: nn.Module, compression: Any = "identity", **options: Any) -> Any:
    options = {"architecture": PS, "timeout_s": 60, **options}
    made = options.pop("optimizer", None) or sgd(model)
    return gradwire.DistributedOptimizer(made, model.named_parameters(), compression, **options)


def run(rank: int, folder: Path) -> Any:
    found = {
        "names": [gradwire.rank(), gradwire.size(), gradwire.local_rank()],
        "exact": {name: _against_ddp(name, rank) for name in ("sequential", "wfbp", "fusion")},
        "golden": {f"{c} {a} {s}": _golden(c, a, s, rank) for c, a, s in METHODS},
        "groups": _added_group(rank),
        "scaled": _scaled(rank),
        "continued": _continued(rank),
        "refused state": _refused_state(rank),
        "bytes": _bytes(rank),
        "clocks": {c: _clocks(c, rank) for c in PUSHED},
        "asp": _converges("asp", 0.1, rank),
        "ssp": _converges("ssp(2)", 0.2, rank),
        "adam": _adam(rank),
        "two": _two_models(rank),
        "schedulers": _with_schedulers(rank),
        "pushed": _pushed_bytes(rank),
        "refused": _refused(),
    }
    dist.barrier()
    return found


def _against_ddp(scheduling: str, rank: int) -> list[float]:
    """With clipping, which needs the mean gradient before step()."""
    plain = DistributedDataParallel(make_model())
    own = make_model()
    for model, optimizer in ((plain, sgd(plain)), (own, distributed(own, scheduling=scheduling))):

        def clip(step: int, model: nn.Module = model) -> None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)

        is_same = train(model, optimizer, range(5), rank, clip)
    return [float((flat(plain) - flat(own)).abs().max()), float(is_same)]


def _golden(compression: str, architecture: str, scheduling: str, rank: int) -> list[float]:
    """The parameters after a run of the simulator's own model and data."""
    config = Config(
        **GOLDEN,
        compression=compression,
        architecture=architecture,
        scheduling=scheduling,
        compute="fixed(1)",
    )
    experiment = setup.prepare(config)
    shape, classes = experiment.dataset.input_shape, experiment.dataset.num_classes
    model = build_seeded(MLP((8,)), shape, classes, config.seed)
    optimizer = distributed(
        model,
        compression,
        architecture=architecture,
        scheduling=scheduling,
        seed=config.seed,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )
    is_same = True
    for step in range(config.steps):
        inputs, targets = experiment.plan.batch(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        is_same = is_same and is_same_everywhere(flat(model))
    simulated = gradwire.simulate(config)
    return [float((flat(model) - simulated.params).abs().max()), float(is_same)]


def _added_group(rank: int) -> bool:
    model, head = make_model(), nn.Linear(4, 3)
    gradwire.broadcast_parameters(head.state_dict())
    before = flat(head)
    optimizer = gradwire.DistributedOptimizer(
        sgd(model), compression="ef(topk(0.2))", architecture=PS
    )
    train(model, optimizer, range(2), rank)
    optimizer.add_param_group({"params": head.parameters(), "lr": 0.01})
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(step + 10 * rank))
        head(model(x)).square().mean().backward()
        optimizer.step()
    moved = float((flat(head) - before).abs().max()) > 0
    return moved and is_same_everywhere(torch.cat([flat(model), flat(head)]))


def _scaled(rank: int) -> list[Any]:
    model = make_model()
    optimizer, scaler = distributed(model, "ef(sign)"), torch.amp.GradScaler("cpu", init_scale=8.0)
    moved = []
    for step in range(3):
        before = flat(model).clone()
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        scaler.scale(loss * float("inf") if step == 1 and rank == 0 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        moved.append(not torch.equal(before, flat(model)))
    return [moved, is_same_everywhere(flat(model))]


def _continued(rank: int) -> dict[str, float]:
    found = {}
    for rule in ("bsp", "ssp(0)"):
        whole, first, second = make_model(), make_model(), make_model()
        train(whole, _adam_with(whole, rule), range(6), rank)
        optimizer = _adam_with(first, rule)
        train(first, optimizer, range(3), rank)
        saved = optimizer.state_dict()
        second.load_state_dict(first.state_dict())
        optimizer = _adam_with(second, rule)
        optimizer.load_state_dict(saved)
        train(second, optimizer, range(3, 6), rank)
        found[rule] = float((flat(whole) - flat(second)).abs().max())
    return found


def _refused_state(rank: int) -> list[Any]:
    """A state of another compression: nothing of it is loaded."""
    optimizer = _adam_with(make_model(), "ssp(0)")
    own = optimizer.state_dict()
    own["param_groups"][0]["lr"] = 7.0
    saved = {"version": 1, "compression": "ef(sign)"}
    try:
        optimizer.load_state_dict({**own, "gradwire": saved})
    except ValueError as error:
        return [str(error), optimizer.param_groups[0]["lr"]]
    return []


def _adam_with(model: nn.Module, rule: str) -> Any:
    made = torch.optim.Adam(model.parameters(), lr=0.01)
    return distributed(model, "ef(topk(0.1))", optimizer=made, synchronization=rule)


def _bytes(rank: int) -> list[float]:
    model = make_model()
    optimizer = distributed(model)
    train(model, optimizer, range(4), rank)
    stats = optimizer.stats()
    dense = 4.0 * stats.steps * flat(model).numel()
    return [stats.steps, stats.bytes_sent / dense, stats.bytes_received / dense]


def _clocks(compression: str, rank: int) -> list[float]:
    """ssp(0) is the mean of all local steps: for plain SGD that is bsp."""
    plain, own = make_model(), make_model()
    train(plain, distributed(plain), range(5), rank)
    optimizer = distributed(own, compression, synchronization="ssp(0)")
    is_same = train(own, optimizer, range(5), rank)
    return [float((flat(plain) - flat(own)).abs().max()), float(is_same)]


def _converges(rule: str, lr: float, rank: int) -> list[float]:
    """The mean loss over all batches before and after."""
    model = make_model()
    made = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    optimizer = distributed(model, "ef(topk(0.2))", synchronization=rule, optimizer=made)

    def mean_loss() -> float:
        with torch.no_grad():
            return sum(float(loss_of(model, r, s)) for r in range(SIZE) for s in range(4)) / 8

    before = mean_loss()
    for step in range(150):
        optimizer.zero_grad()
        loss_of(model, rank, step % 4).backward()
        optimizer.step()
    return [before, mean_loss()]


def _adam(rank: int) -> bool:
    """The optimizer is the worker's own; the model at the start is that of rank 0."""
    model = make_model()
    if rank:
        with torch.no_grad():
            model[0].bias.fill_(5.0)
    made = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = distributed(model, synchronization="ssp(0)", optimizer=made)
    return train(model, optimizer, range(3), rank) and float(model[0].bias.max()) < 1


def _with_schedulers(rank: int) -> list[float]:
    """A scheduler of the learning rate, made before and after; and closures."""
    models = [make_model() for _ in range(3)]
    for number, model in enumerate(models):
        optimizer: Any = sgd(model)
        halve = torch.optim.lr_scheduler.StepLR
        scheduler = halve(optimizer, 1, gamma=0.5) if number == 0 else None
        optimizer = distributed(model, optimizer=optimizer, synchronization="ssp(0)")
        scheduler = scheduler or halve(optimizer, 1, gamma=0.5)
        for step in range(3):

            def closure(step: int = step, model: nn.Module = model, own: Any = optimizer) -> Any:
                own.zero_grad()
                loss = loss_of(model, rank, step)
                loss.backward()
                return loss

            if number == 2:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            scheduler.step()
        assert optimizer.stats().steps == 3
    first = flat(models[0])
    return [float(is_same_everywhere(first))] + [
        float((flat(model) - first).abs().max()) for model in models[1:]
    ]


def _two_models(rank: int) -> bool:
    """One with means, one that servers hold, in turns."""
    first, second = make_model(), make_model(20)
    optimizers = distributed(first, "ef(sign)"), distributed(second, synchronization="ssp(0)")
    for step in range(3):
        for model, optimizer in zip((first, second), optimizers):
            train(model, optimizer, range(step, step + 1), rank)
    return is_same_everywhere(torch.cat([flat(first), flat(second)]))


def _pushed_bytes(rank: int) -> list[float]:
    model = make_model()
    optimizer = distributed(model, "ef(sign)", synchronization="ssp(0)")
    train(model, optimizer, range(4), rank)
    stats = optimizer.stats()
    dense = 4.0 * stats.steps * flat(model).numel()
    return [stats.steps, stats.bytes_sent / dense, stats.bytes_received / dense]


def _refused() -> dict[str, str]:
    model, found = make_model(), {}
    for name, compression, options in (
        ("servers", "identity", {"architecture": "parameter_server(3)"}),
        ("optimizer", "identity", {"architecture": 'parameter_server(2, optimizer="server")'}),
        ("allreduce", "identity", {"architecture": "allreduce", "synchronization": "asp"}),
        ("powersgd", "powersgd(1)", {"synchronization": "asp"}),
        ("rule", "identity", {"synchronization": "localsgd(4)"}),
    ):
        try:
            distributed(model, compression, **options)
        except ValueError as error:
            found[name] = str(error)
    return found


def staleness(rank: int, folder: Path) -> Any:
    """Worker 1 waits before its first step until worker 0 has taken as many as it may alone."""
    bound, steps = 2, 8
    model, store = make_model(), dist.distributed_c10d._get_default_store()
    optimizer = distributed(model, synchronization=f"ssp({bound})")
    ahead = 0
    for step in range(steps):
        if rank == 1 and step == 1:
            while store.add("taken 0", 0) < bound + 1:
                time.sleep(0.001)
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        store.add(f"begun {rank}", 1)
        optimizer.step()
        store.add(f"taken {rank}", 1)
        ahead = max(ahead, step + 1 - store.add(f"begun {1 - rank}", 0))
    dist.barrier()
    return ahead


def uneven(rank: int, folder: Path) -> Any:
    """Worker 1 leaves after three steps; worker 0 takes ten."""
    model = make_model()
    optimizer = distributed(model, "ef(topk(0.2))", synchronization="ssp(1)")
    for step in range(3 if rank else 10):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    gradwire.shutdown()
    return optimizer.stats().steps
