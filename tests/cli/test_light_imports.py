"""Help, version and wrong arguments come without torch; so does `import gradwire`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gradwire
from sampling import slow

HEAVY = ("torch", "matplotlib", "zmq", "numpy")
LOADED = "import sys; print([name for name in {heavy} if name in sys.modules])"


def loaded_after(code: str) -> list[str]:
    """The heavy modules that a new process has imported after this code."""
    script = f"{code}\n{LOADED.format(heavy=HEAVY)}"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    found: list[str] = eval(done.stdout.splitlines()[-1])
    return found


def test_importing_gradwire_imports_nothing_heavy():
    assert loaded_after("import gradwire") == []
    assert loaded_after("import gradwire; gradwire.Config(workers=3); gradwire.__version__") == []


def test_importing_what_runs_does():  # or the other tests would show nothing
    assert "torch" in loaded_after("import gradwire; gradwire.simulate")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["run", "--help"],
        slow(["compare", "--help"]),
        slow(["timeline", "--help"]),
        slow(["timeline", "--steps-shown", "0"]),
        slow(["ps", "--help"]),
        slow(["probe", "--help"]),
        slow(["matrix", "--help"]),
        slow(["rd", "--help"]),
        slow(["list", "--help"]),
        ["run", "--workers", "0"],
        slow(["run", "--workers", "x"]),
        slow(["run", "--lr", "0.1"]),
        ["rnu"],
        [],
        slow(["--tyro-print-completion", "bash"]),
    ],
)
def test_help_and_wrong_arguments_import_nothing_heavy(arguments):
    code = f"""
from gradwire.cli import main
try:
    main({arguments})
except SystemExit:
    pass
"""
    assert loaded_after(code) == []


def test_every_public_name_is_there():
    for name in gradwire.__all__:
        assert getattr(gradwire, name) is not None
        assert name in dir(gradwire)
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        _ = gradwire.simulat


def test_the_version_is_printed():
    done = subprocess.run(
        [sys.executable, "-m", "gradwire", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"gradwire {gradwire.__version__}\n"


def test_an_interrupt_while_something_is_imported_leaves_no_traceback(tmp_path):
    """A module of the name torch that sends SIGINT while it is imported."""
    (tmp_path / "torch.py").write_text(
        "import os, signal, time\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "time.sleep(60)\n"  # the interrupt ends this
    )
    before = os.environ.get("PYTHONPATH", str(Path(gradwire.__file__).parent.parent))
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{before}"}
    done = subprocess.run(
        [sys.executable, "-m", "gradwire", "run"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 130
    assert done.stderr == ""
