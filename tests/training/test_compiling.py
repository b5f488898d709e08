"""When gradients are compiled, how they are rounded, and where what was compiled is kept."""

from pathlib import Path

import pytest
import torch

from gradwire.experiment.run.config import Config
from gradwire.experiment.run.setup import prepare
from gradwire.training.evaluation import compiling
from gradwire.training.evaluation.arithmetic import TF32, Arithmetic
from gradwire.training.evaluation.compiling import cache_folder, pays_to_compile

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def flags() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def test_short_runs_are_not_compiled() -> None:
    resnet20, step = 269_722, 32 * 32
    assert not pays_to_compile(resnet20, 48 * step), "one epoch"
    assert not pays_to_compile(resnet20, 1000 * step)
    assert pays_to_compile(resnet20, 3000 * step)


@pytest.mark.parametrize("choice", ["auto", "always", "never"])
def test_on_a_cpu_nothing_is_compiled(choice: str) -> None:
    experiment = prepare(Config(compile=choice, evaluation="vmap", compute="fixed(0.01)"))  # type: ignore[arg-type]
    assert not experiment.plan.task._evaluator.compile  # type: ignore[attr-defined]
    assert experiment.config.compile == choice


@pytest.mark.parametrize(
    ("tf32", "expected"),
    [("none", (False, False)), ("convolutions", (False, True)), ("all", (True, True))],
)
def test_rounding_is_set_for_a_while(tf32: TF32, expected: tuple[bool, bool]) -> None:
    before = flags()
    with Arithmetic(tf32).used_on(CUDA):
        assert flags() == expected
    assert flags() == before
    with Arithmetic(tf32).used_on(CPU):
        assert flags() == before


def test_rounding_is_put_back_after_an_error() -> None:
    before = flags()
    with pytest.raises(ZeroDivisionError), Arithmetic("all").used_on(CUDA):
        raise ZeroDivisionError
    assert flags() == before


@pytest.mark.parametrize(("name", "value"), [("compile", "sometimes"), ("tf32", "half")])
def test_unknown_choices_are_refused(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        Config(**{name: value})


def test_the_folder_is_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(compiling.FOLDER_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "gradwire" / "compiled"
    monkeypatch.setenv(compiling.FOLDER_VARIABLE, "/elsewhere")
    assert cache_folder() == Path("/elsewhere")


@pytest.mark.slow
def test_what_was_compiled_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(compiling.FOLDER_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def double(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x.sin() * 2,)

    x = torch.ones(3)
    graph = torch.fx.symbolic_trace(double)
    (result,) = compiling.compiled(graph, channels_last=False)(x)
    assert torch.allclose(result, x.sin() * 2)
    assert any(path.is_file() for path in cache_folder().rglob("*"))
