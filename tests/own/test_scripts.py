"""Scripts as users write them: their module, their data, one call of `gradwire.simulate`."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import gradwire
from gradwire.core.key import Key
from gradwire.data import Iid, Sampler
from gradwire.experiment.run.given import split_given
from gradwire.experiment.studies.compare import compare
from gradwire.own.data import OwnData
from gradwire.warning import GradwireWarning


class SmallCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Linear(6 * 36, 2)

    def forward(self, images):
        x = F.relu(self.norm(self.conv(images)))
        return self.head(x.view(x.size(0), -1))  # fails if the memory format was changed


def images(num, seed):
    x = torch.randn(num, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    y = torch.randint(0, 2, (num,), generator=torch.Generator().manual_seed(seed + 1))
    x[y == 1] += 1.0
    return x, y


def test_a_small_cnn_with_batch_norm_learns(build):
    module = build(SmallCNN)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    run = gradwire.simulate(
        model=module,
        data=(images(256, 0), images(128, 5)),
        workers=4,
        batch_size=16,
        epochs=10,
        compression="ef(topk(0.1))",
        compute="fixed(0.01)",
    )
    assert run.accuracy > 0.95
    assert run.config.model.startswith("object:SmallCNN#")
    assert run.config.data.startswith("object:tensors#")
    assert (run.config.loss, run.config.metric) == ("cross_entropy", "accuracy")
    # The user's module is neither trained nor changed; the result can be loaded into it.
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    trained = run.state_dict()
    assert int(trained["norm.num_batches_tracked"]) == run.summary["steps"]
    module.load_state_dict(trained)
    module.eval()
    x, y = images(128, 5)
    accuracy = float((module(x).argmax(dim=1) == y).double().mean())
    assert accuracy == pytest.approx(run.accuracy)


class Texts(Dataset):
    """Texts of different lengths; the class says whether there are more ones than twos."""

    def __init__(self, num, seed):
        generator = random.Random(seed)
        self.texts = [generator.choices([1, 2], k=generator.randint(3, 9)) for _ in range(num)]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        text = self.texts[index]
        return torch.tensor(text), int(text.count(1) > text.count(2))


def pad(examples):
    texts, labels = zip(*examples)
    return nn.utils.rnn.pad_sequence(list(texts), batch_first=True), torch.tensor(labels)


class BagOfSymbols(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(3, 8, padding_idx=0)
        self.head = nn.Linear(8, 2)

    def forward(self, texts):
        return self.head(self.embedding(texts).sum(dim=1))


def test_a_dataset_with_collate_of_different_lengths(build):
    run = gradwire.simulate(
        model=build(BagOfSymbols),
        data=(Texts(200, 0), Texts(100, 1)),
        collate=pad,
        workers=2,
        batch_size=16,
        epochs=8,
        compute="fixed(0.01)",
    )
    assert run.accuracy > 0.9


class Pairs(nn.Module):
    """Takes its inputs by name."""

    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(10, 4)
        self.items = nn.Embedding(10, 4)

    def forward(self, user, item):
        return (self.users(user) * self.items(item)).sum(dim=-1)


class PairsOfDict(Pairs):
    """Takes one dict."""

    def forward(self, batch):
        return super().forward(batch["user"], batch["item"])


class PairsOfTuple(Pairs):
    def forward(self, item, user):
        return super().forward(user, item)


def ratings(num, form):
    user = torch.arange(num) % 10
    item = (torch.arange(num) // 3) % 10
    inputs = {"user": user, "item": item} if form is dict else (item, user)
    return inputs, ((user % 2) == (item % 2)).float()


def test_dicts_and_tuples_as_inputs_are_the_same_network(build):
    runs = [
        gradwire.simulate(
            model=build(kind),
            data=(ratings(120, form), ratings(60, form)),
            workers=3,
            batch_size=8,
            epochs=4,
            optimizer="adam(0.05)",
            compute="fixed(0.01)",
        )
        for kind, form in ((Pairs, dict), (PairsOfDict, dict), (PairsOfTuple, tuple))
    ]
    assert {run.config.evaluation for run in runs} == {"vmap"}
    assert (runs[0].config.loss, runs[0].config.metric) == ("mse", "loss")
    assert all(torch.equal(run.params, runs[0].params) for run in runs)
    first, last = runs[0].metrics[0], runs[0].metrics[-1]
    assert last["test_metric"] < 0.7 * first["test_metric"]
    assert last["test_metric"] == pytest.approx(last["test_loss"])
    assert (last["metric"], runs[0].metric) == ("loss", last["test_metric"])
    with pytest.raises(ValueError, match=r"no accuracy: its metric is loss"):
        _ = runs[0].accuracy


class DataDependent(nn.Module):
    """Chooses its way by a value, which vmap cannot do."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.left = nn.Linear(8, 3)
        self.right = nn.Linear(8, 3)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.left(h) if h.mean().item() > 0 else self.right(h)


def test_control_flow_on_values_follows_plain_sgd(build, points):
    steps, workers, batch_size, seed, lr = 12, 2, 8, 3, 0.3
    module = build(DataDependent)
    with pytest.warns(GradwireWarning, match=r"one worker after another: vmap cannot evaluate it"):
        run = gradwire.simulate(
            model=module,
            data=points,
            workers=workers,
            batch_size=batch_size,
            steps=steps,
            seed=seed,
            optimizer=f"sgd({lr})",
            compute="fixed(0.01)",
        )
    assert run.config.evaluation == "sequential"
    assert "item()" in run.summary["evaluation_reason"]

    plain = build(DataDependent)
    optimizer = torch.optim.SGD(plain.parameters(), lr=lr)
    data = OwnData("points", points)
    sampler = Sampler(data, Iid(), workers, batch_size, Key(seed).child("data"))
    ways = set()
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(workers):
            x, y = (part[sampler.indices(rank, step)] for part in points[0])
            ways.add(bool(torch.tanh(plain.first(x)).mean() > 0))
            (F.cross_entropy(plain(x), y) / workers).backward()
        optimizer.step()
    assert ways == {True, False}
    for name, parameter in plain.named_parameters():
        assert torch.allclose(run.state_dict()[name], parameter, atol=1e-6, rtol=0), name


def test_a_factory_draws_its_weights_from_the_seed_of_the_run(points, simulate):
    def make_model():
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    runs = [simulate(model=make_model, data=points, seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(runs[0].params, runs[1].params)
    assert runs[0].config.model == runs[1].config.model != runs[2].config.model
    assert runs[0].config.data == runs[2].config.data
    assert runs[0].config.model.startswith("object:make_model#")


def test_own_loss_and_metric(points, simulate, build):
    def hinge(outputs, targets):
        return F.multi_margin_loss(outputs, targets)

    def errors(outputs, targets):
        return float((outputs.argmax(dim=1) != targets).double().mean())

    run = simulate(model=lambda: nn.Linear(4, 3), data=points, loss=hinge, metric=errors)
    assert (run.config.loss, run.config.metric) == ("object:hinge", "object:errors")
    assert run.summary["metric"] == "errors"
    trained = build(lambda: nn.Linear(4, 3))
    trained.load_state_dict(run.state_dict())
    assert run.metric == pytest.approx(errors(trained(points[1][0]), points[1][1]))
    assert run.summary["test_loss"] == pytest.approx(
        hinge(trained(points[1][0]), points[1][1]).item(), rel=1e-5
    )


def test_an_own_module_on_data_of_this_package(simulate):
    run = simulate(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), data="digits", steps=60
    )
    assert run.config.data == "digits"
    assert run.accuracy > 0.6


def test_a_model_of_this_package_on_own_data(points, simulate):
    run = simulate(model="mlp((16,))", data=points, steps=60, partition="dirichlet(0.5)")
    assert run.config.model == "mlp((16,))"
    assert run.accuracy > 0.6


def test_other_dimensions_and_networks(points, simulate):
    run = simulate(
        model=lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
        data=points,
        workers=4,
        synchronization="ssp(2)",
        architecture="parameter_server(2)",
        compression="fp16",
        scheduling="wfbp",
    )
    assert run.bytes_sent > 0
    run = simulate(
        model=lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
        data=points,
        what_if=("10Gbit",),
        scheduling="priority",
    )
    assert run.summary["virtual_times_s"]["10Gbit"] < run.virtual_time_s


def test_a_comparison_makes_the_data_once(points):
    calls = []

    def make_data():
        calls.append(1)
        return points

    texts, given = split_given({"model": lambda: nn.Linear(4, 3), "data": make_data})
    base = gradwire.Config(
        **texts, workers=2, batch_size=8, steps=4, compute="fixed(0.01)", compression="ef(sign)"
    )
    outcomes = compare([base], given=given)
    assert [outcome.config.compression for outcome in outcomes] == ["identity", "fp16", "ef(sign)"]
    assert all(outcome.run is not None for outcome in outcomes)
    assert len(calls) == 1
