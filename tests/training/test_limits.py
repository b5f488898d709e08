"""What a plan says that its workers exchange: all of it, and nothing else."""

import pytest
import torch

from gradwire.core.errors import WireError
from gradwire.core.limits import Limits, is_valid, kept_nbytes, specs_in
from gradwire.core.notation import notation_name
from gradwire.core.spec import Spec
from gradwire.synchronization import SYNCHRONIZATION
from gradwire.testing.quadratics import train
from gradwire.training.optimizer import Adam
from sampling import cover

METHODS = [
    (text, cls) for cls in SYNCHRONIZATION for text in (cls.examples or (notation_name(cls),))
]
METHODS += [
    (text, text)
    for text in ('localsgd(2, momentum="average")', "diloco(4, fragments=2)", "diloco(4, delay=2)")
]


def forms_means(method: str) -> bool:
    needs = SYNCHRONIZATION.parse(method).needs
    return needs[0] == "mean"


@pytest.mark.filterwarnings("ignore::gradwire.core.errors.GradwireWarning")
@pytest.mark.parametrize("nonfinite", ["error", "skip"])
@pytest.mark.parametrize("method", cover(case for case in METHODS if forms_means(case[0])))
def test_servers_take_all_that_the_workers_of_a_plan_exchange(method, nonfinite) -> None:
    settings = {"workers": 3, "steps": 8, "scheduling": 'sequential("layer")', "lr": 0.05}
    settings |= {"optimizer": Adam(0.05), "nonfinite": nonfinite}
    through = train(method, "parameter_server(2)", "identity", **settings)
    direct = train(method, "allreduce", "identity", **settings)
    torch.testing.assert_close(through.params[0], direct.params[0])


def test_a_plan_says_which_tensors_there_are() -> None:
    plan = train("bsp", "parameter_server", scheduling='sequential("layer")', steps=1).plan
    limits, params = plan.limits(), plan.task.initial_params()
    sizes = {bucket.name: bucket.numel for bucket in plan.buckets()}
    vectors = dict.fromkeys(plan.optimizer.init(params), params.numel())
    assert limits.numels == {**sizes, "nonfinite": 1, **vectors}
    assert limits.itemsize == 8


def test_specs_and_what_is_kept_of_a_job() -> None:
    limits = Limits({"x": 10}, itemsize=4)
    limits.check_job("x", (Spec((2, 5), torch.float32), None))
    for wrong in (Spec((11,), torch.float32), Spec((10,), torch.float64), Spec((-1,), torch.int8)):
        with pytest.raises(WireError, match="'x' has 10 elements of at most 4 bytes"):
            limits.check_job("x", (wrong,))
    with pytest.raises(WireError, match="'y' is no tensor"):
        limits.check_job("y", None)
    assert list(specs_in((1, ("a", Spec((3,), torch.int8))))) == [Spec((3,), torch.int8)]
    assert is_valid(Spec((6,), torch.float32, tensors=(("a", 0, 6, (2, 3)),)))
    assert not is_valid(Spec((6,), torch.float32, tensors=(("a", 0, 6, (2, 4)),)))
    assert not is_valid(Spec((6,), torch.float32, tensors=(("a", 0, 7, (7,)),)))
    assert not is_valid(Spec((6,), torch.float32, tensors=(("a", 0, 6, (-2, -3)),)))
    assert kept_nbytes({"a": torch.zeros(5), "b": [None, (torch.zeros(1),)]}) == 1024 + 24
