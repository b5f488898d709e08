"""The scripts in examples/, as users start them."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SLOW = pytest.mark.slow


def run(
    script: Path, size: int, folder: Path, arguments: Sequence[str] = (), servers: int = 0
) -> str:
    """What a script prints that runs on so many ranks; 0: it starts its ranks itself."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={size}", str(script)]
    if not size:
        command = [sys.executable, str(script)]
    if servers:
        command = [sys.executable, "-m", "gradwire", "launch", f"--workers={size}"]
        command += [f"--servers={servers}", "--", sys.executable, str(script)]
    command += arguments
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
    ("size", "servers", "script", "expected"),
    [
        (2, 0, "ddp.py", "test accuracy 9"),
        (2, 0, "optimizer.py", "epoch 7"),
        (4, 0, "fsdp_gpt.py", "step 60"),
        (2, 0, "mnist_cnn.py", "plain DDP"),
        (2, 2, "servers.py", "epoch 29"),
    ],
)
def test_examples_run(size, servers, script, expected, tmp_path):
    printed = run(ROOT / "examples" / script, size, tmp_path, servers=servers)
    assert expected in printed
    assert "less than an all-reduce" in printed


def test_the_mnist_example_compares_with_plain_ddp(tmp_path):
    """Few steps on the digits of the package."""
    example = ROOT / "examples" / "mnist_cnn.py"
    printed = run(example, 2, tmp_path, ["--data", "digits", "--steps", "20"])
    rows = [line for line in printed.splitlines() if "%" in line]
    names = ("plain DDP", "ef(topk(0.01) >> fp16)")
    assert len(rows) == len(names)
    sent = []
    for row, name in zip(rows, names):
        assert row.startswith(name)
        accuracy, _, kilobytes, _ = row.removeprefix(name).split()
        assert float(accuracy.rstrip("%")) > 50
        sent.append(float(kilobytes))
    assert sent[0] > 50 * sent[1]


def test_the_notebook_runs(monkeypatch):
    """Its cells, in order, without a kernel."""
    matplotlib = pytest.importorskip("matplotlib")
    backend = matplotlib.get_backend()
    matplotlib.use("Agg")
    notebook = json.loads((ROOT / "examples" / "compare.ipynb").read_text())
    names: dict = {"__name__": "__main__"}
    threads = torch.get_num_threads()
    try:
        for number, cell in enumerate(notebook["cells"]):
            if cell["cell_type"] == "code":
                assert not cell["outputs"], "clear the outputs before committing"
                exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    finally:
        torch.set_num_threads(threads)
        matplotlib.pyplot.close("all")
        matplotlib.use(backend)
    runs, times = names["runs"], names["times"]
    assert all(run.accuracy > 0.85 for run in runs.values())
    sent = {method: run.bytes_sent for method, run in runs.items()}
    assert sent["identity"] > 1.9 * sent["fp16"] > 10 * sent["ef(sign)"]
    assert times(runs["ef(sign)"])["10Mbit"] < 0.2 * times(runs["identity"])["10Mbit"]
    assert names["best"]["10Gbit"] in ("identity", "fp16")
    assert len(names["figure"].axes) == 2


def test_the_table_of_examples_has_all():
    page = (ROOT / "examples" / "README.md").read_text()
    files = {
        path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb")
    }
    assert {name for name in files if f"`{name}`" not in page} == set()


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


@pytest.mark.slow
def test_the_snippet_with_servers_runs(tmp_path):
    script = tmp_path / "train.py"
    snippet = next(one for one in snippets("docs/training_loops.md") if "parameter_server" in one)
    script.write_text(snippet)
    assert run(script, 2, tmp_path, servers=2).count("20 steps, each:") == 2


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
