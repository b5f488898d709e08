"""Recorded gradients: the bits of plain calls, in memory that no later call overwrites."""

import pytest
import torch
from torch import Tensor, nn

from gradwire.core.errors import GradwireWarning
from gradwire.models.mlp import MLP
from gradwire.training.evaluation import VmapEvaluator, graphs, make_evaluator
from gradwire.training.evaluation.cuda_graphs import recorder_for
from gradwire.training.evaluation.graphs import PLAIN_CALLS, OneByOne, RecordedPrograms
from gradwire.training.gradient import GradientRequest, GradientResult
from gradwire.training.skeleton import Skeleton
from gradwire.training.task import Task
from sampling import slow
from training.conftest import CASES, Case
from training.recorders import Refusing, Replayer

NUM_STEPS = PLAIN_CALLS + 3


class _Net(nn.Module):
    """A convolution with running statistics of two types, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.3)
        self.fc = nn.Linear(4 * 6 * 6, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.drop(torch.relu(self.norm(self.conv(x)))).flatten(1))


class _NetCase(Case):
    def module(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            return _Net().double()


NET = _NetCase(MLP(), (1, 8, 8), 10)


@pytest.fixture
def network(request) -> Case:
    """By name: those of `conftest.py`, or `net`."""
    return NET if request.param == "net" else CASES[request.param]


def evaluator(case: Case, **options) -> VmapEvaluator:
    skeleton = Skeleton(case.module(), torch.device("cpu"))
    return VmapEvaluator(case.model, skeleton, compile=False, **options)


def train(case: Case, evaluate: VmapEvaluator, num_workers: int) -> list[list[GradientResult]]:
    """The results of each step; workers begin together and take steps of their own."""
    params = [evaluate.skeleton.params] * num_workers
    buffers = [evaluate.skeleton.buffers] * num_workers
    steps = []
    for step in range(NUM_STEPS):
        results = evaluate(case.requests(params, buffers, step))
        params = [x - 0.05 * result.gradient for x, result in zip(params, results)]
        buffers = [result.buffers for result in results]
        steps.append(results)
    return steps


def bits(steps: list[list[GradientResult]]) -> list[list[Tensor]]:
    return [
        [
            result.loss.clone(),
            result.gradient.clone(),
            *(b.clone() for b in result.buffers.values()),
        ]
        for results in steps
        for result in results
    ]


def assert_equal(found: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    assert len(found) == len(expected)
    for some, wanted in zip(found, expected):
        assert len(some) == len(wanted)
        for one, other in zip(some, wanted):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("few", [1, 8])
@pytest.mark.parametrize("network", ["net", "mlp", "nanogpt", slow("resnet20")], indirect=True)
def test_recorded_gradients_have_the_bits_of_plain_calls(network, few, num_workers) -> None:
    expected = bits(train(network, evaluator(network, few=few), num_workers))
    recorder = Replayer()
    recorded = evaluator(network, few=few, recorder=recorder)
    steps = train(network, recorded, num_workers)
    assert recorder.num_records >= 1
    assert recorder.num_replays == recorder.num_waits > 0
    # After the last step: no step has overwritten the results of another.
    assert_equal(bits(steps), expected)


def test_a_program_is_recorded_after_some_plain_calls() -> None:
    recorder = Replayer()
    train(NET, evaluator(NET, recorder=recorder), 2)
    assert recorder.num_records == 1
    assert recorder.num_replays == NUM_STEPS - PLAIN_CALLS


@pytest.mark.parametrize("num_workers", [2, 5])
def test_few_requests_have_the_bits_of_each_alone(num_workers: int) -> None:
    few, alone = evaluator(NET, few=8, recorder=Replayer()), evaluator(NET)
    params = [few.skeleton.params] * num_workers
    buffers = [few.skeleton.buffers] * num_workers
    for step in range(NUM_STEPS):
        requests = NET.requests(params, buffers, step)
        results = few(requests)
        each = [alone([request])[0] for request in requests]
        assert_equal(bits([results]), bits([each]))
        params = [x - 0.05 * result.gradient for x, result in zip(params, results)]
        buffers = [result.buffers for result in results]


def test_more_than_few_requests_are_one_program() -> None:
    evaluate = evaluator(NET, few=2)
    evaluate._programs = {}  # not those of other tests
    params, buffers = evaluate.skeleton.params, evaluate.skeleton.buffers
    for count, num_programs in [(1, 1), (2, 1), (3, 2)]:
        evaluate(NET.requests([params] * count, [buffers] * count))
        assert len(evaluate._programs) == num_programs


def test_without_convolutions_few_requests_are_one_batch() -> None:
    case = Case(MLP((5,)), (1, 4, 4), 10)
    evaluate = evaluator(case, few=8)
    evaluate._programs = {}  # not those of other tests
    for count in (1, 3):
        evaluate(case.requests([evaluate.skeleton.params] * count, [{}] * count))
    assert len(evaluate._programs) == 2


def test_a_recording_that_fails_is_tried_once() -> None:
    expected = bits(train(NET, evaluator(NET), 2))
    recorder = Refusing()
    with pytest.warns(GradwireWarning, match="cannot be recorded.*not permitted") as caught:
        found = bits(train(NET, evaluator(NET, recorder=recorder), 2))
    assert len(caught) == 1
    assert recorder.num_records == 1
    assert_equal(found, expected)


def test_an_error_of_the_program_is_raised() -> None:
    def fails(x: Tensor) -> tuple[Tensor, ...]:
        raise ZeroDivisionError

    programs = RecordedPrograms(Replayer(), plain_calls=0)
    with pytest.warns(GradwireWarning, match="ZeroDivisionError"), pytest.raises(ZeroDivisionError):
        programs.call("key", fails, [torch.ones(2)])


def test_the_number_of_recordings_is_bounded() -> None:
    recorder = Replayer()
    programs = RecordedPrograms(recorder, plain_calls=0)
    for size in range(1, 60):
        x = torch.arange(size)
        (double,) = programs.call(size, lambda x: (2 * x,), [x])
        assert torch.equal(double, 2 * x)
    assert recorder.num_records == programs.num_recorded < 30


def test_arguments_that_repeat_one_memory_are_copied() -> None:
    programs = RecordedPrograms(Replayer(), plain_calls=0)
    for value in (1.0, 2.0):
        repeated = torch.full((1, 3), value).expand(4, 3)
        transposed = torch.arange(6.0).view(2, 3).t()
        results = programs.call("key", lambda x, y: (x + 1, 2 * y), [repeated, transposed])
        assert torch.equal(results[0], repeated + 1)
        assert torch.equal(results[1], 2 * transposed)


def test_a_program_for_one_is_called_for_each() -> None:
    both = OneByOne(lambda x, y: (x + y, y), 2)
    one, two = torch.tensor([1.0]), torch.tensor([2.0])
    added, second = both(one, two, two, two)
    assert added.tolist() == [3.0, 4.0]
    assert second.tolist() == [2.0, 2.0]


def test_recorders_are_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    skeleton = Skeleton(NET.module(), torch.device("cpu"))
    evaluate = make_evaluator(NET.model, skeleton, "vmap", None)
    assert isinstance(evaluate, VmapEvaluator)
    assert evaluate._recorded is None
    assert evaluate.few == 1
    assert recorder_for(torch.device("cpu")) is None
    assert recorder_for(torch.device("cuda", 0)) is not None
    monkeypatch.setenv("GRADWIRE_CUDA_GRAPHS", "0")
    assert recorder_for(torch.device("cuda", 0)) is None


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator (CUDA)")


def cuda_steps(
    monkeypatch: pytest.MonkeyPatch, num_workers: int, compile: bool, graphs: bool
) -> tuple[list[list[Tensor]], RecordedPrograms | None]:
    monkeypatch.setenv("GRADWIRE_CUDA_GRAPHS", str(int(graphs)))
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    case = Case(MLP(), (1, 8, 8), 10)
    task = Task(case.model, NET.module().float(), "cuda", compile=compile)
    params, buffers = [task.initial_params()] * num_workers, [task.initial_buffers()] * num_workers
    steps = []
    for step in range(NUM_STEPS):
        requests = [
            GradientRequest(r.params, r.buffers, r.inputs.float(), r.targets, r.key)
            for r in case.requests(params, buffers, step)
        ]
        results = task.gradients(requests)
        params = [x - 0.05 * result.gradient for x, result in zip(params, results)]
        buffers = [result.buffers for result in results]
        steps.append(results)
    assert isinstance(task._evaluator, VmapEvaluator)
    return bits(steps), task._evaluator._recorded


@needs_cuda
@pytest.mark.parametrize("compile", [False, slow(True)])
@pytest.mark.parametrize("num_workers", [1, 4, 16])
def test_on_cuda_graphs_have_the_bits_of_plain_calls(monkeypatch, num_workers, compile) -> None:
    expected, none = cuda_steps(monkeypatch, num_workers, compile, graphs=False)
    found, recorded = cuda_steps(monkeypatch, num_workers, compile, graphs=True)
    assert none is None
    assert recorded is not None
    assert recorded.num_recorded == 1
    assert_equal(found, expected)


@needs_cuda
def test_on_cuda_any_stream_may_ask() -> None:
    recorder = recorder_for(torch.device("cuda", torch.cuda.current_device()))
    assert recorder is not None
    programs = RecordedPrograms(recorder, plain_calls=0)
    weight = torch.rand(2048, 2048, device="cuda")

    def work(x: Tensor) -> tuple[Tensor, ...]:
        for _ in range(20):
            x = (weight @ x).clamp(0, 1) + x
        return (x,)

    given = [torch.rand(2048, 64, device="cuda") for _ in range(8)]
    expected = [work(x)[0] for x in given]
    torch.cuda.synchronize()
    found = []
    for x in given:
        with torch.cuda.stream(torch.cuda.Stream()):
            found += programs.call("key", work, [x])
    torch.cuda.synchronize()
    assert programs.num_recorded == 1
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@needs_cuda
def test_on_cuda_a_failed_capture_leaves_the_device_as_it_was() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    recorder = recorder_for(device)
    assert recorder is not None
    programs = RecordedPrograms(recorder, plain_calls=1)
    before = torch.cuda.current_stream()
    x = torch.ones(1000, device=device)

    def waits(x: Tensor) -> tuple[Tensor, ...]:
        return (x * float((2 * x).sum()),)

    with pytest.warns(GradwireWarning, match="cannot be recorded"):
        results = [programs.call("waits", waits, [x])[0] for _ in range(4)]
    assert all(torch.equal(result, 2000 * x) for result in results)
    assert programs.num_recorded == 0
    assert torch.cuda.current_stream() == before
    with torch.random.fork_rng(devices=[device]):
        assert torch.rand(10, device=device).max() < 1  # the generator does not wait for a graph
    torch.cuda.empty_cache()
    another = recorder_for(device)
    assert another is not None
    others = RecordedPrograms(another, plain_calls=0)
    (result,) = others.call("doubles", lambda x: (2 * x,), [x])
    assert torch.equal(result, 2 * x)
    assert others.num_recorded == 1


def test_computations_on_many_bytes_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_MOST_NBYTES", 40)
    recorder = Replayer()
    programs = RecordedPrograms(recorder, plain_calls=0)
    for size in (10, 11):  # float32
        programs.call(size, lambda x: (2 * x,), [torch.ones(size)])
    assert recorder.num_records == 1


def test_too_little_memory_is_said_to_be_the_reason() -> None:
    class Full(Replayer):
        def record(self, work):
            raise torch.OutOfMemoryError("full")

    programs = RecordedPrograms(Full(), plain_calls=0)
    with pytest.warns(GradwireWarning, match="too little memory"):
        (double,) = programs.call("key", lambda x: (2 * x,), [torch.ones(2)])
    assert double.tolist() == [2, 2]
