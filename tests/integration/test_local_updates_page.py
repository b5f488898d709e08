"""The script of docs/local_updates.md and examples/local_sgd.py, as users start them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(folder: Path, script: Path, *arguments: str) -> str:
    """What a script prints that runs on two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [*command, str(script), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_script_of_the_page_runs(tmp_path):
    page = (ROOT / "docs" / "local_updates.md").read_text()
    (snippet,) = re.findall(r"```py\n(.*?)```", page, flags=re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text(snippet)
    assert run(tmp_path, script).count("40 steps, each:") == 2


@pytest.mark.slow
@pytest.mark.parametrize("method", ["local_sgd", "diloco", "decentralized"])
def test_the_example_trains(method, tmp_path):
    printed = run(tmp_path, ROOT / "examples" / "local_sgd.py", "--method", method)
    accuracy = re.search(r"test accuracy ([0-9.]+)%", printed)
    assert accuracy is not None
    assert float(accuracy[1]) > 90
    assert "less than an all-reduce" in printed
