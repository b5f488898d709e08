"""Does compression pay once communication overlaps with computation? Measures for
docs/scheduling.md.

    python experiments/scheduling.py            # measures, keeps the figures, writes the tables
    python experiments/scheduling.py --write    # writes the tables again from the kept figures

8 workers, all-reduce, 50 us of latency, coding charged by the table of costs. Gradients are drawn,
not computed: virtual times depend on the sizes of tensors only. A gradient takes what one of batch
32 took on one core of a 2-core AMD EPYC. Exposed communication is the time of a step less that of
the same step at 1000 Tbit/s.

Times are virtual and the same on every machine. The answer is in the tables; the commit that made
them is in scheduling.json.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import kept
from gradwire.experiment.report.comparison import format_seconds
from gradwire.experiment.run.config import Config
from gradwire.experiment.studies.step_times import seconds_per_step

KEPT = kept.ROOT / "experiments" / "scheduling.json"
PAGE = kept.ROOT / "docs" / "scheduling.md"
STEPS = 3
FASTEST = "1000Tbit"
NETWORKS = ("100Mbit", "1Gbit", "10Gbit")
CODECS = ("identity", "fp16", "ef(sign)", "ef(topk(0.01))")
# Name of the model, its data, seconds of a gradient, bytes of buckets for fusion and dear.
MODELS = (
    ("mlp((256, 128))", "mnist", 0.0014, 200_000),
    ("mnist_cnn", "mnist", 0.0085, 20_000),
    ("char_lstm", "shakespeare", 0.23, 200_000),
    ("resnet20", "cifar10", 0.16, 50_000),
)
# Those whose buckets or order depend on the bandwidth run once for each network.
SAME_EVERYWHERE = (
    "sequential",
    'sequential("layer")',
    "wfbp",
    "fusion({0}, first={1})",
    "dear({0})",
)
OWN_ON_EACH = ("mgwfbp", "priority")
TOPOLOGIES = (
    "switch",
    'racks(2, uplink="1Gbit")',
    'racks(4, uplink="1Gbit")',
    "wan(2)",
    "wan(4)",
)
ARCHITECTURES = (
    "allreduce",
    "ring",
    "hierarchical(2)",
    "hierarchical(4)",
    "torus2d",
    "parameter_server",
    "parameter_server(2)",
)
BASE = Config(
    workers=8, steps=STEPS, batch_size=1, eval_every=STEPS, threads=1, evaluation="sequential"
)


def measure_schedules() -> list[dict[str, Any]]:
    rows = []
    for model, data, compute_s, nbytes in MODELS:
        base = replace(BASE, model=model, data=data, compute=f"fixed({compute_s})")
        for codec in CODECS:
            for text in (*SAME_EVERYWHERE, *OWN_ON_EACH):
                name = text.format(nbytes, nbytes // 4)
                config = replace(base, compression=codec, scheduling=name)
                firsts = NETWORKS if text in OWN_ON_EACH else NETWORKS[:1]
                others = () if text in OWN_ON_EACH else NETWORKS[1:]
                for first in firsts:
                    what_if = (*others, FASTEST)
                    times = seconds_per_step(replace(config, bandwidth=first, what_if=what_if))
                    for network in (first, *others):
                        row = {
                            "model": model,
                            "network": network,
                            "codec": codec,
                            "schedule": name,
                            "step_s": times[network],
                            "exposed_s": times[network] - times[FASTEST],
                        }
                        rows.append(row)
                print(f"{model} {codec} {name}", file=sys.stderr, flush=True)
    return rows


def measure_topologies() -> list[dict[str, Any]]:
    """Communication of a step, on links of 10 Gbit/s."""
    model, data, *_ = MODELS[0]
    base = replace(BASE, model=model, data=data, compute="fixed(0.0)", coding="free")
    return [
        {
            "topology": topology,
            "architecture": architecture,
            "step_s": seconds_per_step(
                replace(base, topology=topology, architecture=architecture, bandwidth="10Gbit")
            )["10Gbit"],
        }
        for topology in TOPOLOGIES
        for architecture in ARCHITECTURES
    ]


def verdict(rows: Sequence[dict[str, Any]], model: str, network: str) -> str:
    """The fastest method against the fastest overlapped one without compression but fp16."""
    own = [row for row in rows if (row["model"], row["network"]) == (model, network)]
    dense = min(
        (r for r in own if r["codec"] in CODECS[:2]), key=lambda r: (r["step_s"], r["codec"])
    )
    best = min((r for r in own if r["codec"] in CODECS[2:]), key=lambda r: r["step_s"])
    ratio = dense["step_s"] / best["step_s"]
    what = f"`{best['codec']}` with `{best['schedule']}`"
    against = f"`{dense['codec']}` with `{dense['schedule']}`"
    if ratio > 1.05:
        return f"yes: {what} is {ratio:.2g}x as fast as {against}"
    if ratio < 0.95:
        return f"no: {against} is {1 / ratio:.2g}x as fast as {what}"
    return f"no difference: {what} and {against} are within 5%"


def schedule_table(rows: Sequence[dict[str, Any]], model: str) -> str:
    """Time of a step and, in brackets, exposed communication."""
    found = {(r["network"], r["codec"], r["schedule"]): r for r in rows if r["model"] == model}
    names = list(dict.fromkeys(schedule for _, _, schedule in found))
    lines = []
    for network in NETWORKS:
        for codec in CODECS:
            own = [found[network, codec, name] for name in names]
            least = min(row["step_s"] for row in own)
            cells = []
            for row in own:
                text = f"{format_seconds(row['step_s'])} ({format_seconds(row['exposed_s'])})"
                cells.append(f"**{text}**" if row["step_s"] <= 1.001 * least else text)
            lines.append([network, f"`{codec}`", *cells])
    return kept.markdown(["network", "codec", *(f"`{name}`" for name in names)], lines, left=2)


def against_wfbp(rows: Sequence[dict[str, Any]], model: str, schedule: str) -> list[Any]:
    """[(time of a step / that of wfbp, network, codec)], from the best to the worst."""
    own = {
        (r["network"], r["codec"], r["schedule"].partition("(")[0]): r["step_s"]
        for r in rows
        if r["model"] == model
    }
    return sorted(
        (own[network, codec, schedule] / own[network, codec, "wfbp"], network, codec)
        for network in NETWORKS
        for codec in CODECS
    )


def against_table(rows: Sequence[dict[str, Any]]) -> str:
    """For each model and schedule the best and the worst cell."""
    lines = []
    for model, *_ in MODELS:
        for schedule in ("mgwfbp", "priority", "dear"):
            ratios = against_wfbp(rows, model, schedule)
            cells = [f"{r:.3f} ({network}, `{codec}`)" for r, network, codec in ratios]
            wins = sum(r < 0.99 for r, *_ in ratios)
            lines.append([f"`{model}`", f"`{schedule}`", cells[0], cells[-1], f"{wins} of 12"])
    heads = ["model", "schedule", "best", "worst", "more than 1% faster"]
    return kept.markdown(heads, lines, left=4)


def topology_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for topology in TOPOLOGIES:
        own = {r["architecture"]: r["step_s"] for r in rows if r["topology"] == topology}
        least = min(own.values())
        cells = [
            f"**{format_seconds(s)}**" if s <= 1.001 * least else format_seconds(s)
            for s in own.values()
        ]
        lines.append([f"`{topology}`", *cells])
    return kept.markdown(["topology", *(f"`{name}`" for name in ARCHITECTURES)], lines)


def verdict_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        [f"`{model}`", network, verdict(rows, model, network)]
        for model, *_ in MODELS
        for network in NETWORKS
    ]
    return kept.markdown(["model", "network", "does compression pay?"], lines, left=3)


def main() -> None:
    if "--write" not in sys.argv[1:] and not kept.checks():
        began = time.perf_counter()
        measured = {
            "commit": kept.commit(),
            "hardware": "virtual times: the same everywhere",
            "schedules": measure_schedules(),
            "topologies": measure_topologies(),
        }
        KEPT.write_text(kept.compact(measured))
        print(f"{time.perf_counter() - began:.0f} s", file=sys.stderr)
    results = json.loads(KEPT.read_text())
    tables = {f"{model}": schedule_table(results["schedules"], model) for model, *_ in MODELS}
    tables["verdicts"] = verdict_table(results["schedules"])
    tables["against wfbp"] = against_table(results["schedules"])
    tables["topologies"] = topology_table(results["topologies"])
    kept.write_page(PAGE, kept.with_tables(PAGE.read_text(), tables))


if __name__ == "__main__":
    main()
