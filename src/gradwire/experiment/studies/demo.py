"""The demonstration: eight ways to exchange gradients, on data that comes with the package."""

from dataclasses import replace
from typing import Any

from gradwire.experiment.run.config import Config

BASE = Config(
    data="digits",
    model="mlp",
    workers=4,
    batch_size=16,
    epochs=20.0,
    optimizer="sgd(0.2)",
    schedule="cosine",
    bandwidth="100Mbit",
    what_if=("1Gbit", "10Gbit"),
    compute="fixed(0.001)",  # with one thread: the same table on every machine
    threads=1,
)
METHODS: tuple[dict[str, Any], ...] = (
    {"compression": "identity"},
    {"compression": "fp16"},
    {"compression": "ef(sign)"},
    {"compression": "qsgd(bits=4)"},
    {"compression": "topk(0.01)"},
    {"compression": "ef(topk(0.01))"},
    {"compression": "ef(randomk(0.01))"},
    {"synchronization": "localsgd(8)"},
)


def demo_configs() -> list[Config]:
    return [replace(BASE, **method) for method in METHODS]
