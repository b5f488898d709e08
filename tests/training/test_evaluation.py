"""The two ways of evaluation agree with each other and change nothing they are given."""

import copy
import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from gradwire.core.key import Key
from gradwire.models.mlp import MLP
from gradwire.training.evaluation import resolve
from gradwire.training.evaluation.vmap import _pieces
from gradwire.training.optimizer import SGD
from gradwire.training.task import GradientRequest, GradientResult, Task
from sampling import slow

BATCHABLE = ["mlp", slow("mnist_cnn"), slow("resnet20"), "nanogpt", slow("nanogpt_tied")]
NUM_WORKERS = 3


def assert_same(results: list[GradientResult], expected: list[GradientResult]) -> None:
    assert len(results) == len(expected)
    for a, b in zip(results, expected):
        torch.testing.assert_close(a.loss, b.loss, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(a.gradient, b.gradient, rtol=1e-8, atol=1e-11)
        assert a.buffers.keys() == b.buffers.keys()
        for name in a.buffers:
            torch.testing.assert_close(a.buffers[name], b.buffers[name], rtol=1e-10, atol=1e-12)


@pytest.mark.few
@pytest.mark.parametrize("case", BATCHABLE, indirect=True)
def test_vmap_equals_sequential_over_several_steps(case) -> None:
    module = case.module()
    vmapped = Task(case.model, module, mode="vmap")
    sequential = Task(case.model, module, mode="sequential")
    optimizer = SGD(0.1)
    # The first step has one shared vector, the later ones a vector for each worker.
    params = [vmapped.initial_params()] * NUM_WORKERS
    buffers = [vmapped.initial_buffers()] * NUM_WORKERS
    for step in range(3):
        requests = case.requests(params, buffers, step)
        results = vmapped.gradients(requests)
        assert_same(results, sequential.gradients(requests))
        params = [
            optimizer.update(x, result.gradient, {}, lr=0.1)[0]
            for x, result in zip(params, results)
        ]
        buffers = [result.buffers for result in results]
    assert all(result.gradient.abs().max() > 0 for result in results)
    assert not torch.equal(params[0], params[1])


@pytest.mark.few(2)
@pytest.mark.parametrize("mode", ["vmap", "sequential"])
@pytest.mark.parametrize("case", ["mlp", "mnist_cnn", "nanogpt"], indirect=True)
def test_same_requests_give_the_same_bits_and_nothing_is_changed(case, mode) -> None:
    task = Task(case.model, case.module(), mode=mode)
    requests = case.requests(
        [task.initial_params() + 0.01 * rank for rank in range(NUM_WORKERS)],
        [task.initial_buffers() for _ in range(NUM_WORKERS)],
    )
    before = copy.deepcopy(requests)
    first, second = task.gradients(requests), task.gradients(requests)
    for a, b, request, old in zip(first, second, requests, before):
        assert torch.equal(a.loss, b.loss)
        assert torch.equal(a.gradient, b.gradient)
        assert not a.gradient.requires_grad
        for name in ("params", "inputs", "targets"):
            assert torch.equal(getattr(request, name), getattr(old, name))
            assert not getattr(request, name).requires_grad
    assert torch.equal(task.initial_params(), Task(case.model, case.module()).initial_params())


@pytest.mark.parametrize("mode", ["vmap", "sequential"])
def test_batch_norm_buffers_are_values(mode) -> None:
    with torch.random.fork_rng(devices=[]):
        module = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    task = Task(MLP(), module, mode=mode)
    buffers = task.initial_buffers()
    assert sorted(buffers) == ["2.num_batches_tracked", "2.running_mean", "2.running_var"]
    inputs, targets = Key(1).normal(32).double().view(8, 4), torch.arange(8) % 3
    request = GradientRequest(task.initial_params(), buffers, inputs, targets, Key(0))
    (result,) = task.gradients([request])
    assert torch.equal(buffers["2.running_mean"], torch.zeros(3))
    assert not torch.equal(result.buffers["2.running_mean"], torch.zeros(3))
    assert int(result.buffers["2.num_batches_tracked"]) == 1
    assert torch.equal(module[2].running_mean, torch.zeros(3))  # the user's module
    assert torch.equal(task.initial_buffers()["2.running_mean"], torch.zeros(3))


@pytest.mark.parametrize("mode", ["vmap", "sequential"])
@pytest.mark.parametrize("case", ["mnist_cnn", slow("nanogpt")], indirect=True)
def test_dropout_masks_follow_the_key(case, mode) -> None:
    task = Task(case.model, case.module(), mode=mode)
    inputs, targets = case.batch(Key(0))
    key = Key(seed=9).at(4).private(1)
    keys = [key, key, key.at(5), key.private(2), replace(key, seed=10)]
    params = task.initial_params()
    requests = [GradientRequest(params, {}, inputs, targets, k) for k in keys]
    same, again, step, rank, seed = (r.gradient for r in task.gradients(requests))
    assert torch.equal(same, again)
    for other in (step, rank, seed):
        assert (same - other).abs().max() > 1e-6


class _ReusesDropout(nn.Module):
    """Calls one dropout layer twice, with two shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 50)
        self.fc2 = nn.Linear(50, 70)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.drop(self.fc1(x))))


@pytest.mark.parametrize("mode", ["vmap", "sequential"])
def test_each_call_of_a_dropout_layer_has_its_own_mask(mode) -> None:
    with torch.random.fork_rng(devices=[]):
        module = _ReusesDropout()
    task = Task(MLP(), module, mode=mode)
    inputs, targets = torch.ones(2, 6), torch.tensor([0, 1])
    request = GradientRequest(task.initial_params(), {}, inputs, targets, Key(1))
    (result,) = task.gradients([request])
    gradient = task.layout.unflatten(result.gradient)
    # A hidden unit dropped in both examples has no gradient: about a quarter of them.
    assert 3 < int((gradient["fc1.bias"] == 0).sum()) < 25
    assert 5 < int((gradient["fc2.bias"] == 0).sum()) < 35


@pytest.mark.parametrize("mode", ["vmap", "sequential"])
def test_no_requests_one_request_and_unequal_batches(mode) -> None:
    with torch.random.fork_rng(devices=[]):
        module = nn.Linear(5, 3).double()
    task = Task(MLP(), module, mode=mode)
    assert task.gradients([]) == []
    params = task.initial_params()

    def request(rank: int, size: int) -> GradientRequest:
        key = Key(2).private(rank)
        inputs = key.normal(5 * size).double().view(size, 5)
        return GradientRequest(params, {}, inputs, key.integers(size, 3), key)

    requests = [request(rank, size) for rank, size in enumerate([2, 4, 2, 1, 4])]
    together = task.gradients(requests)
    alone = [task.gradients([one])[0] for one in requests]
    assert_same(together, alone)


def test_sequential_results_do_not_depend_on_the_others() -> None:
    with torch.random.fork_rng(devices=[]):
        module = nn.Linear(5, 3)
    task = Task(MLP(), module, mode="sequential")
    keys = [Key(2).private(rank) for rank in range(4)]
    requests = [
        GradientRequest(task.initial_params(), {}, k.normal(10).view(2, 5), k.integers(2, 3), k)
        for k in keys
    ]
    for result, one in zip(task.gradients(requests), requests):
        assert torch.equal(result.gradient, task.gradients([one])[0].gradient)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("mlp", "vmap"),
        ("nanogpt", "vmap"),
        ("mnist_cnn", "sequential"),
        ("resnet20", "sequential"),
        ("char_lstm", "sequential"),
    ],
    indirect=["case"],
)
def test_auto_is_a_rule(case, expected) -> None:
    assert Task(case.model, case.module()).mode == expected
    recurrent = "lstm" in repr(case.model)
    on_cuda = resolve("auto", case.module(), torch.device("cuda"))
    assert on_cuda == ("sequential" if recurrent else "vmap")


def test_auto_leaves_large_networks_on_a_cpu_sequential() -> None:
    cpu = torch.device("cpu")
    with torch.device("meta"):
        small, large = nn.Linear(400, 400), nn.Linear(500, 500)
    assert resolve("auto", small, cpu) == "vmap"
    assert resolve("auto", large, cpu) == "sequential"
    assert resolve("vmap", large, cpu) == "vmap"


def test_modes_that_cannot_work_are_refused() -> None:
    with torch.random.fork_rng(devices=[]):
        lstm = nn.LSTM(2, 2)
    with pytest.raises(ValueError, match=r"LSTM has recurrent layers.*use mode sequential"):
        resolve("vmap", lstm, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"unknown evaluation mode 'vmp'. Did you mean vmap"):
        resolve("vmp", lstm, torch.device("cpu"))  # type: ignore[arg-type]


def test_compiled_groups_are_powers_of_two() -> None:
    def sizes(count: int, powers_of_two: bool, few: int = 1) -> list[int]:
        pieces = list(_pieces(list(range(count)), powers_of_two, few))
        assert [index for piece in pieces for index in piece] == list(range(count))
        return [len(piece) for piece in pieces]

    assert sizes(24, True) == [16, 8]
    assert sizes(31, True) == [16, 8, 4, 2, 1]
    assert sizes(32, True) == [32]
    assert sizes(24, False) == [24]
    # The last ones are evaluated one by one.
    assert sizes(31, True, few=8) == [16, 8, 7]
    assert sizes(12, True, few=8) == [8, 4]
    assert sizes(7, True, few=8) == [7]
    assert sizes(12, False, few=8) == [12]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mlp"], indirect=True)
def test_compiled_programs_agree(case, monkeypatch: pytest.MonkeyPatch) -> None:
    # A backend without code generation stands in for the compiler, which CI may not have.
    stand_in = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", stand_in)
    module = case.module()
    compiled = Task(case.model, module, mode="vmap", compile=True)
    params = [compiled.initial_params() + 0.01 * rank for rank in range(NUM_WORKERS)]
    requests = case.requests(params, [{}] * NUM_WORKERS)
    expected = Task(case.model, module, mode="sequential").gradients(requests)
    assert_same(compiled.gradients(requests), expected)
    assert_same(compiled.gradients(requests), expected)


class _Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.fc(x), 0.5)


class _Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1  # type: ignore[operator]
        return self.fc(x)


@pytest.mark.parametrize("mode", ["vmap", "sequential"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [(_Draws, "_Draws draws from torch's generator"), (_Counts, "changes its buffer count")],
)
def test_impure_modules_are_refused(kind, message, mode) -> None:
    with torch.random.fork_rng(devices=[]):
        task = Task(MLP(), kind(), mode=mode)
        request = GradientRequest(
            task.initial_params(), {}, torch.zeros(2, 4), torch.tensor([0, 1]), Key(0)
        )
        with pytest.raises(ValueError, match=message):
            task.gradients([request])
