"""The example runs, and shows what it says."""

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_model.py"


def test_the_example_runs(tmp_path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--epochs", "0.5"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no warnings
    title, *rows, last = done.stdout.splitlines()
    assert title.split()[0] == "compression"
    sent = {row.split("  ")[0]: int(row.split()[-5].replace(",", "")) for row in rows}
    assert list(sent) == ["identity", "fp16", "ef(topk(0.02) >> fp16)", "ef(powersgd(2))"]
    assert 2 * sent["fp16"] == sent["identity"] > 20 * sent["ef(topk(0.02) >> fp16)"]
    fp16 = next(row for row in rows if row.startswith("fp16")).split()[1]
    assert last.endswith(fp16)  # the loaded model is the one that was tested
