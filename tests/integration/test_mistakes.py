"""What users get who take a wrong turn: an error that says what was given and what to do."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.core.errors import PeerLost
from gradwire.integration.communicator import _explain
from gradwire.integration.stats import Stats
from gradwire.warning import GradwireWarning


def _model() -> nn.Module:
    with torch.random.fork_rng():
        return nn.Linear(2, 3)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


GIVEN = [
    (lambda model: model, "Got a Linear"),
    (lambda model: model.parameters(), "Got a generator of Parameter"),
    (lambda model: model.state_dict(), "Got a OrderedDict of str"),
    (lambda model: "ef(sign)", r"Got 'ef\(sign\)'"),
    (lambda model: 3, "Got a int"),
]


@pytest.mark.parametrize(("given", "match"), GIVEN)
def test_what_is_not_named_parameters(given, match):
    model = _model()
    match = f"named_parameters is model.named_parameters.*{match}"
    with pytest.raises(ValueError, match=match):
        gradwire.DistributedOptimizer(_sgd(model), given(model))
    with pytest.raises(ValueError, match=match):
        gradwire.ddp_comm_hook("fp16", named_parameters=given(model))


def test_a_model_is_not_an_optimizer():
    with pytest.raises(ValueError, match=r"one of torch\.optim, got a Linear"):
        gradwire.DistributedOptimizer(_model())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("topk(1%)", r"Did you mean topk\(0\.01\)"),
        ("top-k(0.01)", r"Did you mean topk\(0\.01\)"),
        ("topk(10)", r"To keep 1%, write 0\.01"),
        ("sgn", "Did you mean sign"),
        ("fp61", "Did you mean fp16"),
        ("ef(topk)", r"topk needs density: write topk\(density\)"),
        (0.01, "a compression is an expression"),
    ],
)
def test_compressions_that_are_none(text, match):
    with pytest.raises(ValueError, match=match):
        gradwire.ddp_comm_hook(text)


RULES = 'partition({"conv*": "fp16", "*": "ef(sign)"})'


def test_rules_for_names_that_are_not_known():
    model = _model()
    match = "chooses by the names of parameters.*named_parameters=model.named_parameters"
    with pytest.raises(ValueError, match=match):
        gradwire.ddp_comm_hook(f"ef({RULES})".replace("ef(sign)", "sign"))
    with pytest.raises(ValueError, match=match):
        gradwire.DistributedOptimizer(_sgd(model), compression=RULES)
    gradwire.ddp_comm_hook('partition({"*": "fp16"}, min_size=9)')  # needs no names


def test_rules_for_names_that_no_parameter_has():
    model = _model()
    match = r"the rule 'conv\*' matches no tensor; the tensors are weight, bias"
    with pytest.raises(ValueError, match=match):
        gradwire.ddp_comm_hook(RULES, named_parameters=model.named_parameters())
    with pytest.raises(ValueError, match=match):
        gradwire.DistributedOptimizer(_sgd(model), model.named_parameters(), RULES)


def test_an_optimizer_for_a_model_under_ddp(alone):
    model = DistributedDataParallel(_model())
    with pytest.warns(GradwireWarning, match="gradients are averaged twice"):
        gradwire.DistributedOptimizer(_sgd(model), model.named_parameters())


def test_rare_averages_of_a_model_under_ddp(alone):
    model = DistributedDataParallel(_model())
    with pytest.raises(ValueError, match="nothing is left to average rarely"):
        gradwire.local_sgd(model, _sgd(model), period=2)


def test_a_model_without_shards():
    with pytest.raises(ValueError, match="Linear has no FSDP module: shard it first"):
        gradwire.compress_replicas(_model(), None, "fp16")  # type: ignore[arg-type]


def test_a_text_as_a_number_of_steps():
    with pytest.raises(ValueError, match="a number of steps, or 0 for never, got '100'"):
        gradwire.log_every("100")  # type: ignore[arg-type]


def test_without_processes_broadcasts_say_what_to_call():
    with pytest.raises(RuntimeError, match=r"call gradwire\.init\(\) first"):
        gradwire.broadcast_parameters(_model().state_dict())
    with pytest.raises(RuntimeError, match=r"call gradwire\.init\(\) first"):
        gradwire.broadcast_optimizer_state(_sgd(_model()))


def test_a_rank_that_took_fewer_steps():
    text = str(PeerLost(1, 0.5, 0.5))
    assert text.startswith("rank 1 is gone")
    assert "Do all ranks take the same number of steps?" in text


def test_a_rank_that_leaves_may_live():
    text = str(_explain(PeerLost(1, 0.5, 0.5), range(3)))
    assert "Do all ranks take the same number of steps?" in text
    assert "If rank 1 still runs, its own exchange has failed" in text
    other = KeyError("mine")
    assert _explain(other, range(3)) is other


def test_figures_of_one_rank_alone():
    stats = Stats(2, 0, 0, 0, 0.0, 0.0, 0.0, 0.0)
    assert str(stats).startswith("2 steps, each: 0 B sent, 0 B received, 0 ms encoding")
    assert "all-reduce" not in str(Stats(2, 4000, 4000, 0, 0.0, 0.0, 0.0, 0.0))  # with servers
    stats = Stats(2, 4000, 4000, 80_000, 0.0, 0.0, 0.0, 0.0)
    assert "each: 2 kB sent, 2 kB received (20x less than an all-reduce)," in str(stats)
    assert "10 ms waiting for messages, " in str(Stats(2, 0, 0, 0, 0.0, 0.0, 0.02, 0.0))


GARBAGE = [
    ("garbage", r"got 'garbage' \(str\)"),
    (3, r"got '3' \(int\)"),
    ([], "got"),
    (["a", "b"], "a list of what it returned on all ranks"),
    ({"version": 2}, "without compression, rank, size, step, buckets"),
    ({"version": 1, "states": []}, "is not what state_dict"),
]


@pytest.mark.parametrize(("saved", "match"), GARBAGE)
def test_states_that_are_none(saved, match):
    """They are refused at once, and not in the first backward pass."""
    state, _ = gradwire.ddp_comm_hook("ef(sign)")
    with pytest.raises(ValueError, match=match):
        state.load_state_dict(saved)
    model = _model()
    optimizer = gradwire.DistributedOptimizer(_sgd(model), model.named_parameters(), "ef(sign)")
    own = optimizer.state_dict()
    own["param_groups"][0]["lr"] = 7.0
    if saved:  # else there is none
        with pytest.raises(ValueError, match=match):
            optimizer.load_state_dict({**own, "gradwire": saved})
        assert optimizer.param_groups[0]["lr"] == 0.1  # nothing was loaded


def test_states_of_another_compression(alone):
    model = _model()
    optimizer = gradwire.DistributedOptimizer(_sgd(model), model.named_parameters(), "ef(sign)")
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    match = r"is of ef\(sign\), this is ef\(topk\(0\.5\)\): load it with the same compression"
    other = gradwire.DistributedOptimizer(
        _sgd(model := _model()), model.named_parameters(), "ef(topk(0.5))"
    )
    with pytest.raises(ValueError, match=match):
        other.load_state_dict(saved)
    state, _ = gradwire.ddp_comm_hook("ef(topk(0.5))")
    with pytest.raises(ValueError, match=match):
        state.load_state_dict(saved["gradwire"])


def test_names_of_compiled_modules():
    """Rules and saved states have the names of the module that was compiled."""
    model = torch.compile(nn.Sequential(_model()), backend="eager")
    rules = 'partition({"0.*": ef(sign), "*": identity})'
    gradwire.ddp_comm_hook(rules, named_parameters=model.named_parameters())
    optimizer = gradwire.DistributedOptimizer(_sgd(model), model.named_parameters(), rules)
    (layout,) = optimizer._buckets.layouts
    assert [placed[0] for placed in layout] == ["0.weight", "0.bias"]


def test_names_of_buffers_of_compiled_modules(alone):
    model = torch.compile(nn.Sequential(_model(), nn.BatchNorm1d(3)), backend="eager")
    with gradwire.local_sgd(model, _sgd(model)) as context:
        assert list(context.buffers) == [
            "1.running_mean",
            "1.running_var",
            "1.num_batches_tracked",
        ]


def test_an_optimizer_of_shards(alone):
    mesh = init_device_mesh("cpu", (1,))
    shards = nn.Parameter(distribute_tensor(torch.zeros(4), mesh))
    with pytest.raises(ValueError, match=r"^head is sharded.*gradwire\.compress_replicas"):
        gradwire.DistributedOptimizer(torch.optim.SGD([shards], lr=0.1), [("head", shards)])
    with pytest.raises(ValueError, match=r"^parameter 0 of group 0 is sharded"):
        gradwire.DistributedOptimizer(torch.optim.SGD([shards], lr=0.1))
    optimizer = gradwire.DistributedOptimizer(_sgd(_model()))
    with pytest.raises(ValueError, match=r"^parameter 1 of group 1 is sharded"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2)), shards]})
    assert len(optimizer.param_groups) == 1
    model = nn.Module()
    model.head = shards
    with pytest.raises(ValueError, match=r"^head is sharded"):
        gradwire.local_sgd(model, torch.optim.SGD([shards], lr=0.1))


def test_methods_that_draw_by_names():
    model = _model()
    text = "ef(allocated(500, choices=(randomk(0.05), sign)))"
    match = "allocated.* draws by the names of parameters.*named_parameters=model.named_parameters"
    with pytest.raises(ValueError, match=match):
        gradwire.ddp_comm_hook(text)
    with pytest.raises(ValueError, match=match):
        gradwire.DistributedOptimizer(_sgd(model), compression=text)
    gradwire.ddp_comm_hook(text, named_parameters=model.named_parameters())
