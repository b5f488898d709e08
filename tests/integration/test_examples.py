"""The scripts in examples/, as users start them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SLOW = pytest.mark.slow


def run(script: Path, size: int, folder: Path) -> str:
    """What a script prints that runs on so many ranks; 0: it starts its ranks itself."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={size}", str(script)]
    if not size:
        command = [sys.executable, str(script)]
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "script", "expected"),
    [
        (2, "ddp.py", "test accuracy 9"),
        (2, "optimizer.py", "epoch 7"),
        (4, "fsdp_gpt.py", "step 60"),
    ],
)
def test_examples_run(size, script, expected, tmp_path):
    printed = run(ROOT / "examples" / script, size, tmp_path)
    assert expected in printed
    assert "less than an all-reduce" in printed


def snippets(page: str = "README.md") -> list[str]:
    return re.findall(r"```py\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def test_the_readme_has_three_snippets():
    names = ("ddp_comm_hook", "DistributedOptimizer", "compress_replicas")
    assert [name in snippet for name, snippet in zip(names, snippets(), strict=True)] == [True] * 3


@pytest.mark.parametrize(
    ("number", "size"), [(0, 2), pytest.param(1, 2, marks=SLOW), pytest.param(2, 4, marks=SLOW)]
)
def test_snippets_of_the_readme_run(number, size, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(snippets()[number])
    assert run(script, size, tmp_path).count("20 steps, each:") == size


FRAMEWORKS = {"lightning": 0, "accelerate": 2, "transformers": 2, "ray": 0}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(FRAMEWORKS)), ids=list(FRAMEWORKS))
def test_frameworks_take_the_hook(number, tmp_path):
    """With the real packages, of the extra integration-test."""
    name, size = list(FRAMEWORKS.items())[number]
    pytest.importorskip(
        name, reason=f"{name} is not installed: pip install gradwire[integration-test]"
    )
    snippet = snippets("docs/training_loops.md")[number]
    assert f"import {name}" in snippet or f"from {name}" in snippet
    script = tmp_path / "train.py"
    script.write_text(snippet)
    assert run(script, size, tmp_path).count("8 steps, each:") == 2
