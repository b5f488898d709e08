"""What wrong arguments are answered with: what was given, what was expected, what to do."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import numpy
import pytest
import torch

import gradwire
from gradwire.cli import main
from gradwire.cli.front import command
from gradwire.cli.rd import Construction
from gradwire.coding.polar.construction import CONSTRUCTIONS
from gradwire.compression import COMPRESSION
from gradwire.core.codec import Codec, Kind, unpack
from gradwire.core.errors import GradwireWarning, NotationError, UnfedWarning
from gradwire.core.key import Key
from gradwire.core.reducer import Reducer, unfed
from gradwire.core.spec import Spec
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.registries import DIMENSIONS, OPTIMIZERS, SCHEDULES
from gradwire.experiment.run.setup import prepare
from gradwire.runtime.virtual.compute_time import STRAGGLERS

COMMANDS = ("run", "compare", "ps", "probe", "matrix", "codecs", "rd", "list", "demo")
QUICK = ["--steps", "2", "--batch-size", "8", "--model", "mlp((8,))", "--compute", "fixed(0.001)"]


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert "Traceback" not in printed
    assert "tyro" not in printed
    return printed


@pytest.mark.parametrize("command", ["run", "compare", "ps", "probe"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "0"], "error: workers must be at least 1, got 0."),
        (["--steps", "-2"], "error: steps must be at least 0, got -2."),
        (["--epochs", "nan"], "error: epochs must be above 0 (or give steps), got nan."),
    ],
)
def test_wrong_settings_are_told_in_the_words_of_the_setting(command, arguments, message, capsys):
    printed = refused([command, *arguments], capsys)
    assert printed == f"{message} See gradwire {command} --help."


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--lr", "0.1"], 'learning rate is part of the optimizer: optimizer = "sgd('),
        (["compare", "--lr=0.1"], '--optimizer "sgd(0.1)"'),
        (["run", "--worker", "3"], "gradwire run has no --worker. Did you mean --workers?"),
        (["run", "--servers", "2"], "parameter_server(2)"),
        (["matrix", "--step", "2"], "Did you mean --steps?"),
        (["run", "3"], "does not know what '3' is"),
        (["run", "--workers", "x"], "error: --workers takes a whole number, got 'x'. See gradwire"),
        (["run", "--seed=abc"], "--seed takes a whole number, got 'abc'. See gradwire run --help."),
        (["run", "--batch_size", "1.5"], "--batch-size takes a whole number, got '1.5'."),
        (["run", "--epochs", "x"], "--epochs takes a number, got 'x'."),
        (["run", "--workers"], "--workers needs a whole number after it."),
        (["run", "--out", "--json"], "--out needs a value after it."),
        (
            ["run", "--coding", "fre"],
            "unknown --coding 'fre'. Did you mean free? Valid names: model",
        ),
        (
            ["run", "--engine", "gpu"],
            "Valid names: simulator, process. An accelerator is chosen by",
        ),
        (["run", "--worker", "x", "--seed", "abc"], "--seed takes a whole number"),
        (["rd", "--n", "256", "x"], "--n takes a whole number, got 'x'."),
        (["rd", "--decision", "hrd"], "Did you mean hard?"),
        (["ps", "--number", "x"], "--number takes a whole number, got 'x'."),
        (["ps", "schedler"], "unknown role 'schedler'. Did you mean scheduler?"),
        (["ps", "--number", "1", "wroker"], "unknown role 'wroker'. Did you mean worker?"),
        (["run", "--augment"], "This is the default; --no-augment is the opposite."),
        (["run", "--momentum", "0.9"], '--optimizer "sgd(0.1, momentum=0.9)"'),
        (["compare", "--nesterov"], '--optimizer "sgd(0.1, momentum=0.9, nesterov=True)"'),
        (["compare", "--seeds", "3"], "A run has one seed; run it again for each other one: seed"),
        (["run", "--steps", "5", "--epochs", "3"], "error: --steps 5 and --epochs 3 both say how"),
        (["compare", "--epochs=10", "--steps=5"], "--steps 5 and --epochs 10 both say how long"),
        (["rnu"], "unknown command 'rnu'. Did you mean run?"),
        ([], "give a command: gradwire run, compare"),
        (["--workers", "3", "run"], "write gradwire run --workers"),
        (["--verison"], "unknown option --verison. Did you mean --version?"),
        (["compare", "--compression"], "--compression needs at least one value"),
        (["list", "topkk"], "Did you mean topk?"),
        (["list", "none"], "Did you mean identity?"),
        (["list", "topk(0.01) >> qsgdd(bits=4)"], "'qsgdd'. Did you mean qsgd?"),
    ],
)
def test_unknown_arguments_are_answered_with_what_to_write(arguments, message, capsys):
    assert message in refused(arguments, capsys)


def test_epochs_beside_the_steps_of_a_file_are_refused(capsys, tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("steps = 5")
    printed = refused(["run", "--config", str(path), "--epochs", "3"], capsys)
    assert f"steps = 5 in {path} and --epochs 3 both" in printed
    assert "With --steps 0 epochs count." in printed
    arguments = ["run", "--config", str(path), "--epochs", "3", "--steps", "0"]
    assert command(arguments).config.epochs == 3.0
    path.write_text("epochs = 3")
    assert command(["run", "--config", str(path), "--steps", "5"]).config.steps == 5


def test_right_values_are_let_through():
    assert command(["run", "--workers", "3", "--epochs", "1e-1"]).config.workers == 3
    assert command(["rd", "--n", "256", "512", "--blocks", "None"]).n == (256, 512)
    assert command(["rd", "--decision", "hard", "--seed", "-1"]).seed == -1
    assert command(["ps", "server", "--number", "1"]).role == "server"
    assert command(["ps", "keys", "a.keys"]).file == Path("a.keys")
    assert command(["compare", "--compression", "fp16", "sign"]).config.compression == (
        "fp16",
        "sign",
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_every_number_and_choice_of_a_command_is_checked(name):
    hints = get_type_hints(type(command([name])))
    hints |= get_type_hints(hints.pop("config")) if "config" in hints else {}
    words = ("int", "float", "Literal")
    checked = [option for option, hint in hints.items() if any(w in str(hint) for w in words)]
    for option in {*checked} - {"role"}:  # which is no option but a word
        flag = f"--{option.replace('_', '-')}"
        with pytest.raises(
            ValueError, match=rf"{flag} takes a (whole )?number|unknown {flag} '\?'"
        ):
            command([name, flag, "?"])
    assert checked or name == "list"


def test_a_wrong_wish_for_kernels_is_the_first_thing_that_list_says(capsys, monkeypatch):
    monkeypatch.setenv("GRADWIRE_KERNELS", "fast")
    with pytest.raises(SystemExit):
        main(["list"])
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "GRADWIRE_KERNELS is 'fast'" in printed.err


@pytest.mark.parametrize(
    ("registry", "text", "message"),
    [
        (COMPRESSION, "none", "Did you mean identity?"),
        (COMPRESSION, "None", "Did you mean identity?"),
        (COMPRESSION, "fp32", "Did you mean identity?"),
        (COMPRESSION, "top-k(0.01)", "Did you mean topk(0.01)?"),
        (COMPRESSION, "topk(1%)", "Did you mean topk(0.01)?"),
        (COMPRESSION, "ef(random-k(2.5 %))", "Did you mean ef(randomk(0.025))?"),
        (COMPRESSION, "TopK(0.01)", "Did you mean topk?"),
        (OPTIMIZERS, "sgd(nan)", "nan is not a number of the notation: write a finite one"),
        (OPTIMIZERS, "sgd(-inf)", "write a finite one"),
        (STRAGGLERS, "none", "Did you mean nobody?"),
        (SCHEDULES, "none", "Did you mean constant?"),
        (DIMENSIONS["architecture"], "parameter-server(2)", "Did you mean parameter_server(2)?"),
        (DIMENSIONS["architecture"], "ps", "Did you mean parameter_server?"),
    ],
)
def test_expressions_that_are_nearly_right(registry, text, message):
    with pytest.raises(NotationError, match=re.escape(message)):
        registry.parse(text)


def test_sections_of_a_file_are_named(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text('[network]\nbandwidth = "1Gbit"\n')
    with pytest.raises(ValueError, match=r"\[network\] is a section.*Write bandwidth without it"):
        Config.from_toml(path)
    path.write_text("[others]\nx = 1\n")
    with pytest.raises(ValueError, match=r"\[others\] is a section.*Known: data, model"):
        Config.from_toml(path)


def test_python_calls_are_answered_in_our_words():
    with pytest.raises(ValueError, match=r"gradwire\.simulate\(workers=4\).*got 4"):
        gradwire.simulate(4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'lr'. The learning rate is part of the optimizer"):
        gradwire.simulate(lr=0.1)
    x = torch.zeros(8)
    for codec in ("topk(0.5)", "topk(0.5) >> fp16"):
        with pytest.raises(ValueError, match=r"uint8 tensor, got bytes.*torch\.frombuffer"):
            unpack(COMPRESSION.parse(codec), b"abc", Spec.of(x))
    feedback = COMPRESSION.parse("ef(topk(0.5))")
    with pytest.raises(AttributeError, match=r"ef\(topk\(0\.5\)\) is a way of averaging"):
        feedback.encode(x, None, None)
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = feedback.other
    assert not hasattr(feedback, "encode")
    with pytest.raises(AttributeError, match=r"ef\(topk\(0\.5\)\) is a way .* has no algebra"):
        _ = feedback.algebra
    with pytest.raises(ValueError, match=r"both say how long.*With steps = 0 epochs count"):
        gradwire.simulate(Config(steps=3), epochs=2)


REDUCERS = [
    c
    for cls in COMPRESSION
    for text in cls.examples
    if isinstance(c := COMPRESSION.parse(text), Reducer)
]


@pytest.mark.parametrize("reducer", REDUCERS, ids=repr)
def test_a_reducer_that_is_used_as_a_codec_says_what_it_is(reducer):
    with pytest.raises(ValueError, match=r"is a way of averaging .*: init needs the number"):
        reducer.init(Spec((8,), torch.float32))


def test_arrays_of_numpy_are_answered_with_how_to_convert_them():
    spec = Spec((64,), torch.float32)
    codecs = [COMPRESSION.parse(text) for cls in COMPRESSION for text in cls.examples]
    real = [c for c in codecs if isinstance(c, Codec) and c.traits.takes is Kind.REAL]
    assert len(real) > 50
    for codec in real:
        with pytest.raises(ValueError, match=r"got numpy\.ndarray\. .*torch\.from_numpy\(x\)"):
            codec.encode(numpy.ones(64, "float32"), codec.init(spec), Key(0))
    with pytest.raises(ValueError, match=r"got list\. Convert it: torch\.tensor\(x\)"):
        COMPRESSION.parse("terngrad").encode([1.0, 2.0], None, Key(0))  # type: ignore[attr-defined]


BIASED = ("threshold(0.01)", "powersgd(2)", "sign", "topk(0.5)", "topk(0.3) >> qsgd(bits=4)")
BIASED += ("gtopk(0.1)", "layerwise(sign)", "dq(0.5)", 'partition({"*": "topk(0.5)"})')
NOT = ("identity", "fp16", "fp8", "signvote", "terngrad", "qsgd(bits=4)", "drive", "ef(sign)")
NOT += ("dgc(0.1)", "topk(1.0)", "randomk(0.1, unbiased=True)", "ef(powersgd(2))")


@pytest.mark.parametrize("text", BIASED)
def test_biased_compression_without_feedback_is_warned_of(text):
    spec = Spec((1000,), torch.float32)
    found = unfed(COMPRESSION.parse(text), spec)
    assert found is not None
    assert unfed(COMPRESSION.parse(f"ef({found!r})"), spec) is None


@pytest.mark.parametrize("text", NOT)
def test_other_compression_is_not(text):
    assert unfed(COMPRESSION.parse(text), Spec((1000,), torch.float32)) is None


def test_the_warning_comes_once_and_names_the_remedy(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["compare", *QUICK, "--compression", "sign", "ef(sign)"])
    printed = capsys.readouterr().err
    assert printed.count("warning: ") == 1
    assert "warning: sign is biased" in printed
    assert "Write ef(sign)." in printed
    with pytest.warns(UnfedWarning, match=r"Write ef\(sign\)"):
        gradwire.simulate(steps=1, compute="fixed(0.001)", model="mlp((8,))", compression="sign")


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        (
            'partition({"bias": fp16, "1": "sign", "*": "topk(0.1)"}, min_size=4)',
            'partition({"bias": fp16, "1": ef(sign), "*": ef(topk(0.1))}, min_size=4)',
        ),
        ("velocity(topk(0.1), momentum=0.5)", "velocity(ef(topk(0.1)), momentum=0.5)"),
        (
            'velocity(partition({"*": topk(0.1) >> fp16}))',
            'velocity(partition({"*": ef(topk(0.1) >> fp16)}))',
        ),
        ("layerwise(sign)", "ef(layerwise(sign))"),
    ],
)
def test_the_warning_names_the_whole_expression(text, remedy):
    with pytest.warns(UnfedWarning, match=re.escape(f"Write {remedy}.")):
        prepare(Config(steps=1, compute="fixed(0.001)", model="mlp((8,))", compression=text))
    assert unfed(COMPRESSION.parse(remedy), Spec((1000,), torch.float32)) is None


@pytest.mark.parametrize(
    "settings",
    [
        {"architecture": "gossip(ring, choco(0.3))", "compression": "topk(0.1)"},
        {"synchronization": "lag(0.1)", "compression": "topk(0.1)"},
    ],
)
def test_methods_that_send_again_what_was_lost_are_not_warned_of(settings, recwarn):
    gradwire.simulate(steps=2, compute="fixed(0.001)", model="mlp((8,))", **settings)
    assert [each for each in recwarn if each.category is UnfedWarning] == []


WITHOUT_LIBRARY = """
from gradwire.kernels.native import _library
_library.EXTENSION_SUFFIXES.clear()
from gradwire.cli import main
main({arguments})
"""


def without_library(arguments: list[str], folder: Path, wish: str = "") -> tuple[int, str]:
    environment = {k: v for k, v in os.environ.items() if k != "GRADWIRE_KERNELS"}
    environment |= {"GRADWIRE_KERNELS": wish} if wish else {}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_LIBRARY.format(arguments=arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    return done.returncode, done.stderr


@pytest.mark.slow
def test_a_comparison_without_the_c_library_says_so_once(tmp_path):
    code, printed = without_library(["compare", *QUICK, "--threads", "1"], tmp_path)
    assert code == 0
    assert printed.count("warning: gradwire runs its torch reference kernels") == 1
    assert ".py" not in printed  # no line of code


@pytest.mark.slow
def test_the_wish_for_native_kernels_without_the_library_is_an_error_in_one_line(tmp_path):
    code, printed = without_library(["run", *QUICK], tmp_path, "native")
    assert code == 2
    assert "error: GRADWIRE_KERNELS is 'native' but the C library was not built" in printed
    assert "Traceback" not in printed


def test_other_warnings_are_printed_as_python_does(capsys, monkeypatch):
    import warnings

    from gradwire.cli.console import WarningPrinter

    others: list[str] = []
    printer = WarningPrinter(lambda message, *where, **more: others.append(str(message)))
    monkeypatch.setattr(warnings, "showwarning", printer)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = printer
        warnings.warn("of another library", UserWarning, stacklevel=1)
        for _ in range(2):
            warnings.warn("one of ours", GradwireWarning, stacklevel=1)
    assert others == ["of another library"]
    assert capsys.readouterr().err == "warning: one of ours\n"


def test_the_constructions_that_rd_offers_are_those_that_exist():
    assert set(get_args(Construction)) == set(CONSTRUCTIONS)
