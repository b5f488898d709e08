"""Golden trajectories: what short runs gave when they were recorded, and must still give.

Parameters may differ in the last bits between machines, bytes of fixed-size payloads and virtual
times may not. After a change that is meant to move them:  python tests/golden/test_trajectories.py
"""

import json
from pathlib import Path
from typing import Any

import pytest

import gradwire

FILE = Path(__file__).with_name("trajectories.json")
SETTINGS: dict[str, Any] = {
    "steps": 20,
    "batch_size": 8,
    "model": "mlp((16,))",
    "optimizer": "sgd(0.2, momentum=0.5)",
    "schedule": "cosine(warmup=3)",
    "compute": "lognormal(0.001)",
    "latency": "20us",
    "coding": "free",
    "seed": 11,
}
METHODS: tuple[dict[str, Any], ...] = (
    {"compression": "identity"},
    {"compression": "ef(sign)"},
    {"compression": "qsgd(bits=4)"},
    {"compression": "ef(topk(0.05))"},
    {"compression": "ef(randomk(0.05))", "architecture": "ring", "workers": 3},
    {"synchronization": "localsgd(4)", "partition": "dirichlet(0.5)"},
)


def trajectory(method: dict[str, Any]) -> dict[str, Any]:
    run = gradwire.simulate(**SETTINGS, **method)
    return {
        "bytes_sent": run.bytes_sent,
        "virtual_time_s": run.virtual_time_s,
        "test_loss": run.metrics[-1]["test_loss"],
        "norm": float(run.params.norm()),
        "first": run.params[:5].tolist(),
    }


@pytest.mark.parametrize("number", range(len(METHODS)))
def test_a_run_goes_where_it_went(number):
    golden = json.loads(FILE.read_text())[number]
    assert golden.pop("method") == METHODS[number]
    now = trajectory(METHODS[number])
    if "topk" in METHODS[number].get("compression", ""):  # its gaps depend on the last bits
        assert now.pop("bytes_sent") == pytest.approx(golden.pop("bytes_sent"), rel=0.01)
        assert now.pop("virtual_time_s") == pytest.approx(golden.pop("virtual_time_s"), rel=1e-3)
    else:
        assert now.pop("bytes_sent") == golden.pop("bytes_sent")
        assert now.pop("virtual_time_s") == pytest.approx(golden.pop("virtual_time_s"), rel=1e-6)
    for name, value in golden.items():
        assert now[name] == pytest.approx(value, rel=1e-2, abs=1e-3), name


if __name__ == "__main__":
    rows = [{"method": method, **trajectory(method)} for method in METHODS]
    FILE.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
