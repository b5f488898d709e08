"""Kinds of modules: buffers, dropout, tied and frozen parameters, types, recurrent layers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradwire.core.key import Key
from gradwire.data import Iid, Sampler
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.given import split_given
from gradwire.experiment.run.setup import prepare
from gradwire.own.data import OwnData
from gradwire.training.gradient import GradientRequest
from gradwire.warning import GradwireWarning


def hidden(*layers):
    return nn.Sequential(nn.Linear(4, 8), *layers, nn.Linear(8, 3))


def by_hand(module, points, steps, lr=0.1, batch_size=8, seed=0):
    """One worker, in plain PyTorch."""
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=lr)
    sampler = Sampler(OwnData("points", points), Iid(), 1, batch_size, Key(seed).child("data"))
    for step in range(steps):
        x, y = (part[sampler.indices(0, step)] for part in points[0])
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
    return module


@pytest.mark.parametrize("evaluation", ["vmap", "sequential"])
def test_batch_norm_follows_plain_pytorch(build, points, simulate, evaluation):
    make = lambda: hidden(nn.BatchNorm1d(8), nn.ReLU())  # noqa: E731
    run = simulate(model=build(make), data=points, workers=1, steps=5, evaluation=evaluation)
    plain = by_hand(build(make), points, 5)
    found = run.state_dict()
    for name, wanted in plain.state_dict().items():
        assert torch.allclose(found[name].to(wanted.dtype), wanted, atol=1e-5), name
    assert not torch.equal(found["1.running_mean"], torch.zeros(8))


class Counter(nn.Module):
    """Changes a buffer in place, which is not the statistic of a known layer."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("constant", torch.ones(1000))

    def forward(self, x):
        if self.training:
            self.seen += x.shape[0]
        return self.fc(x) * self.constant[0]


def test_buffers_that_a_module_changes_itself_are_each_workers_own(build, points, simulate):
    with pytest.warns(GradwireWarning, match="Counter changes its buffer seen"):
        run = simulate(model=build(Counter), data=points, steps=5)
    assert float(run.buffers["seen"]) == 5 * 8
    first, second = (replica.buffers for replica in run.replicas)
    assert first["constant"] is second["constant"]  # what does not change is shared


DROPOUTS = {
    "nn.Dropout, vmap": (lambda: hidden(nn.Dropout(0.5)), "vmap"),
    "nn.Dropout, sequential": (lambda: hidden(nn.Dropout(0.5)), "sequential"),
}


class FunctionalDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(F.dropout(self.first(x), 0.5, self.training))


class Encoder(nn.Module):
    """Has dropout inside its attention."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.encoder(x[:, None])[:, 0])


DROPOUTS["F.dropout"] = (FunctionalDropout, "auto")
DROPOUTS["TransformerEncoderLayer"] = (Encoder, "auto")


@pytest.mark.filterwarnings("ignore::gradwire.warning.GradwireWarning")
@pytest.mark.parametrize("kind", DROPOUTS)
def test_dropout_is_reproducible_and_differs_between_workers(build, points, simulate, kind):
    make, evaluation = DROPOUTS[kind]
    runs = [
        simulate(model=build(make), data=points, evaluation=evaluation, seed=seed, steps=3)
        for seed in (0, 0, 1)
    ]
    assert torch.equal(runs[0].params, runs[1].params)
    assert not torch.equal(runs[0].params, runs[2].params)

    texts, given = split_given({"model": build(make), "data": points})
    plan = prepare(Config(**texts, workers=2, batch_size=8, evaluation=evaluation), given).plan
    params, (inputs, targets) = plan.task.initial_params(), plan.batch(0, 0)

    def gradients(step):
        keys = [plan.key.at(step).private(rank) for rank in (0, 1)]
        requests = [GradientRequest(params, {}, inputs, targets, key) for key in keys]
        return [result.gradient for result in plan.task.gradients(requests)]

    first, second = gradients(0)
    assert not torch.equal(first, second)  # on the same batch
    assert all(map(torch.equal, gradients(0), (first, second)))
    assert not torch.equal(gradients(1)[0], first)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.symbols = nn.Embedding(3, 6)
        self.mix = nn.Linear(4, 6)
        self.head = nn.Linear(6, 3, bias=False)
        self.head.weight = self.symbols.weight

    def forward(self, x):
        return self.head(self.mix(x) + self.symbols(torch.zeros(len(x), dtype=torch.long)))


@pytest.mark.parametrize("evaluation", ["vmap", "sequential"])
def test_tied_weights_are_one_parameter(build, points, simulate, evaluation):
    run = simulate(model=build(Tied), data=points, workers=1, evaluation=evaluation)
    plain = by_hand(build(Tied), points, 6)
    assert run.summary["parameters"] == 18 + 30
    assert torch.allclose(run.state_dict()["symbols.weight"], plain.head.weight, atol=1e-6)


def freeze_first():
    module = hidden(nn.ReLU())
    module[0].requires_grad_(False)
    return module


@pytest.mark.parametrize("evaluation", ["vmap", "sequential"])
def test_frozen_parameters_are_neither_trained_nor_sent(build, points, simulate, evaluation):
    run = simulate(model=build(freeze_first), data=points, workers=1, evaluation=evaluation)
    plain = by_hand(build(freeze_first), points, 6)
    assert run.summary["parameters"] == 8 * 3 + 3
    assert sorted(run.state_dict()) == ["2.bias", "2.weight"]
    assert torch.allclose(run.state_dict()["2.weight"], plain[2].weight, atol=1e-6)
    two = simulate(model=build(freeze_first), data=points, evaluation=evaluation, steps=3)
    numel, workers = 27, 2
    assert two.bytes_sent == 3 * workers * 4 * numel  # direct exchange: each sends every value once


class PartlyUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize("evaluation", ["vmap", "sequential"])
@pytest.mark.parametrize("scheduling", ["sequential", "wfbp"])
def test_parameters_without_gradient_stay(build, points, simulate, evaluation, scheduling):
    module = build(PartlyUsed)
    run = simulate(model=module, data=points, evaluation=evaluation, scheduling=scheduling)
    assert torch.equal(run.state_dict()["unused.weight"], module.unused.weight)
    assert not torch.equal(run.state_dict()["used.weight"], module.used.weight)


@pytest.mark.parametrize("evaluation", ["vmap", "sequential"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_types_of_parameters(build, points, simulate, evaluation, dtype):
    data = [(x.to(dtype), y) for x, y in points]
    run = simulate(
        model=build(lambda: hidden(nn.ReLU()).to(dtype)),
        data=data,
        evaluation=evaluation,
        steps=60,
        compression="ef(topk(0.2))",
    )
    assert run.params.dtype is dtype
    assert run.accuracy > 0.5


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 8, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        states, _ = self.lstm(x[..., None])
        return self.head(states[:, -1])


def test_recurrent_layers_with_dropout_inside(build, points, simulate):
    module = build(Recurrent)
    runs = [simulate(model=module, data=points, scheduling="wfbp") for _ in range(2)]
    assert runs[0].config.evaluation == "sequential"
    assert torch.equal(runs[0].params, runs[1].params)
    assert not torch.equal(runs[0].state_dict()["lstm.weight_hh_l0"], module.lstm.weight_hh_l0)


class Structured(nn.Module):
    """Returns a dict."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return {"logits": self.fc(x), "norm": x.square().mean()}


def test_outputs_of_any_kind_with_own_loss(build, points, simulate):
    run = simulate(
        model=build(Structured),
        data=points,
        loss=lambda outputs, targets: F.cross_entropy(outputs["logits"], targets),
        metric=lambda outputs, targets: (outputs["logits"].argmax(1) == targets).double().mean(),
        scheduling="wfbp",
    )
    assert 0.0 < run.metric < 1.0
    assert run.summary["metric"] == "lambda"


def test_a_module_with_one_tensor_overlaps(build, points, simulate):
    run = simulate(model=build(lambda: nn.Linear(4, 3, bias=False)), data=points, scheduling="wfbp")
    assert run.summary["parameters"] == 12


class Impure(nn.Module):
    """Its gradients depend on how often it was called: tracing it once would be wrong."""

    def __init__(self):
        super().__init__()
        self.fc, self.calls = nn.Linear(4, 3), 0

    def forward(self, x):
        self.calls += self.training
        return self.fc(x) * (3.0 if self.calls > 1 else 1.0)


def test_a_module_whose_vmapped_gradient_differs_is_evaluated_as_it_is(build, points, simulate):
    with pytest.warns(GradwireWarning, match="one worker after another"):
        run = simulate(model=build(Impure), data=points)
    assert run.config.evaluation == "sequential"


def test_a_compiled_module_is_the_module_inside(build, points, simulate):
    module = build(lambda: hidden(nn.ReLU()))
    compiled = torch.compile(module)
    found = simulate(model=compiled, data=points)
    assert torch.equal(found.params, simulate(model=module, data=points).params)


class Sampling(nn.Module):
    """Draws while it is tested, too."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(x + torch.randn_like(x))


@pytest.mark.filterwarnings("ignore::gradwire.warning.GradwireWarning")
def test_a_loss_that_draws(build, points, simulate):
    def noisy(outputs, targets):
        return F.cross_entropy(outputs + torch.randn_like(outputs), targets)

    runs = [simulate(model=build(lambda: nn.Linear(4, 3)), data=points, loss=noisy) for _ in "ab"]
    assert runs[0].config.evaluation == "sequential"
    assert torch.equal(runs[0].params, runs[1].params)
    assert runs[0].metrics == runs[1].metrics


@pytest.mark.filterwarnings("ignore::gradwire.warning.GradwireWarning")
@pytest.mark.parametrize("scheduling", ["sequential", "wfbp"])
def test_sparse_gradients_are_made_dense(build, simulate, scheduling):
    x = torch.arange(64) % 5
    data = (x, x % 3)
    runs = [
        simulate(
            model=build(lambda sparse=sparse: nn.Embedding(5, 3, sparse=sparse)),
            data=(data, data),
            evaluation="auto" if sparse else "sequential",
            scheduling=scheduling,
        )
        for sparse in (True, False)
    ]
    assert torch.allclose(runs[0].params, runs[1].params, atol=1e-6)


@pytest.mark.filterwarnings("ignore::gradwire.warning.GradwireWarning")
def test_a_module_that_draws_while_it_is_tested(build, points, simulate):
    runs = [simulate(model=build(Sampling), data=points, scheduling="wfbp") for _ in range(2)]
    assert runs[0].metrics == runs[1].metrics
