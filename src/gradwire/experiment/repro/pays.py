"""When does gradient compression pay? The question of Agarwal et al. 2022 ("On the utility of
gradient compression in distributed training systems", arXiv 2103.00543), on the simulator.

They find that few methods beat data-parallel SGD in 16 bits whose communication overlaps with the
backward pass: coding takes time of its own, and on fast links there is little left to save. Here
the time of a step is that of each method with its best schedule, against fp16 with its best. There
is no training: a step's time depends on sizes only. What compression does to accuracy is the
subject of other recipes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log2
from pathlib import Path

from gradwire.core.units import parse_bandwidth
from gradwire.experiment.report.comparison import format_seconds
from gradwire.experiment.report.drawing import COLOURS, save
from gradwire.experiment.repro.kept import keep, kept_rows
from gradwire.experiment.repro.recipe import Means, Recipe, Row, chosen_names
from gradwire.experiment.repro.scale import Scale
from gradwire.experiment.repro.table import Table
from gradwire.experiment.run.config import Config
from gradwire.experiment.studies.step_times import seconds_per_step

_DENSE = "fp16"
_METHODS = ("ef(sign)", "ef(topk(0.01))", "ef(powersgd(2))", "qsgd(bits=4)", "dgc(0.001)")
# The data of each, the seconds of a gradient and the bytes of fused buckets: those of
# experiments/scheduling.py, of batches of 32 on one core of a 2-core AMD EPYC. On another core
# nanogpt took 1.9 times as long as char_lstm and 3.0 times as long as resnet20.
_MODELS = {
    "mlp((256, 128))": ("mnist", 0.0014, 200_000),
    "mnist_cnn": ("mnist", 0.0085, 20_000),
    "char_lstm": ("shakespeare", 0.23, 200_000),
    "resnet20": ("cifar10", 0.16, 50_000),
    "nanogpt": ("shakespeare", 0.46, 200_000),
}
_SAME_EVERYWHERE = ("sequential", "wfbp", "fusion({0}, first={1})")
_OWN_ON_EACH = "mgwfbp"  # its buckets depend on the bandwidth: one run for each
_STEPS = 3
_DEEPEST = 3.0  # powers of two that have the deepest colour
_NETWORKS: dict[Scale, Sequence[str]] = {
    "smoke": ("10Mbit", "1Gbit"),
    "small": ("10Mbit", "30Mbit", "100Mbit", "300Mbit", "1Gbit", "3Gbit", "10Gbit"),
    "full": ("10Mbit", "30Mbit", "100Mbit", "300Mbit", "1Gbit", "3Gbit", "10Gbit"),
}
_BASE = Config(
    workers=8, steps=_STEPS, batch_size=1, eval_every=_STEPS, threads=1, evaluation="sequential"
)


class Pays(Recipe):
    name = "pays"
    title = "Does compression pay? Time of a step of fp16, relative to that of each method"
    choices = (
        "8 workers, all-reduce, 50 us of latency. Each method and fp16 take the fastest of the "
        "schedules sequential, wfbp and fusion, at full scale mgwfbp, too. Gradients take what a "
        "batch of 32 takes on one core of a 2-core AMD EPYC, and coding what the table of costs "
        "says of that core. On a GPU both are faster, gradients by more."
    )

    def measure(self, means: Means) -> list[Row]:
        path = means.folder / "rows.jsonl"
        done = {row["part"] for row in kept_rows(path, means.scale)}
        parts = {f"{model}, {method}": (model, method) for model, method in _parts(means.scale)}
        for name in chosen_names(list(parts), means.only):
            if name not in done:
                rows = _measured(*parts[name], _NETWORKS[means.scale], means.scale == "full")
                keep(path, means.scale, [{"part": name, **row} for row in rows], {})
                means.say(f"{name}: measured")
        return list(kept_rows(path, means.scale))

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        networks = _networks(rows)
        lines, best = [], _best(rows)
        for (model, method), own in best.items():
            dense = best.get((model, _DENSE))
            cells = []
            for network in networks:
                seconds, schedule = own[network]
                text = format_seconds(seconds)
                if method != _DENSE and dense is not None:
                    text = f"{dense[network][0] / seconds:.3g}x"
                cells.append(f"{text} ({schedule})")
            lines.append([model, method, *cells])
        notes = [_NOTE, _summary(best, networks)] if lines else []
        return [Table(self.title, ("model", "method", *networks), lines, num_words=2, notes=notes)]

    def draw(self, rows: Sequence[Row], folder: Path) -> list[Path]:
        path = folder / f"{self.name}.png"
        _heat_map(rows, path)
        return [path]


_NOTE = (
    "Of fp16 the time of a step; of the others that time divided by their own, so that they are "
    "faster above 1, in brackets the best schedule."
)


def _parts(scale: Scale) -> list[tuple[str, str]]:
    """Models and methods that are measured."""
    models = ["mlp((256, 128))"] if scale == "smoke" else list(_MODELS)
    return [(model, method) for model in models for method in (_DENSE, *_METHODS)]


def _measured(model: str, method: str, networks: Sequence[str], with_mgwfbp: bool) -> list[Row]:
    data, seconds, nbytes = _MODELS[model]
    base = replace(_BASE, model=model, data=data, compute=f"fixed({seconds})", compression=method)
    times: list[tuple[str, dict[str, float]]] = []
    for text in _SAME_EVERYWHERE:
        schedule = text.format(nbytes, nbytes // 4)
        first, *others = networks
        config = replace(base, scheduling=schedule, bandwidth=first, what_if=tuple(others))
        times.append((schedule, seconds_per_step(config)))
    for network in networks if with_mgwfbp else ():
        config = replace(base, scheduling=_OWN_ON_EACH, bandwidth=network)
        times.append((_OWN_ON_EACH, seconds_per_step(config)))
    return [
        {
            "line": f"{model}, {method}, {schedule.partition('(')[0]}",
            "column": network,
            "model": model,
            "method": method,
            "schedule": schedule,
            "step_s": step_s,
        }
        for schedule, found in times
        for network, step_s in found.items()
    ]


Best = dict[tuple[str, str], dict[str, tuple[float, str]]]


def _best(rows: Sequence[Row]) -> Best:
    """By model and method: for each network the least time of a step, and the schedule."""
    found: Best = {}
    for row in rows:
        own = found.setdefault((row["model"], row["method"]), {})
        new = (row["step_s"], row["schedule"].partition("(")[0])
        network = row["column"]
        own[network] = min(own.get(network, new), new)
    return found


def _summary(best: Best, networks: Sequence[str]) -> str:
    """How many pairs of model and method gain more than a twentieth, by bandwidth."""
    own = [
        (found, best[model, _DENSE])
        for (model, method), found in best.items()
        if method != _DENSE and (model, _DENSE) in best
    ]
    counts = [
        f"{network} {sum(dense[network][0] > 1.05 * found[network][0] for found, dense in own)}"
        for network in networks
    ]
    return f"More than 5% faster than fp16, of {len(own)} pairs: {', '.join(counts)}."


def _networks(rows: Sequence[Row]) -> list[str]:
    """The bandwidths of the rows, the slowest first."""
    return sorted({row["column"] for row in rows}, key=parse_bandwidth)


def _heat_map(rows: Sequence[Row], path: Path) -> None:
    """One field per method and bandwidth for each model: blue where it is faster than fp16."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import LinearSegmentedColormap

    best, networks = _best(rows), _networks(rows)
    models = [model for model, method in best if method == _DENSE]
    colours = LinearSegmentedColormap.from_list("pays", (COLOURS[1], "#ffffff", COLOURS[0]))
    figure, panels = pyplot.subplots(
        len(models),
        1,
        figsize=(1.5 + 0.85 * len(networks), 0.4 + 2.1 * len(models)),
        layout="constrained",
        squeeze=False,
    )
    for panel, model in zip(panels[:, 0], models):
        dense = best[model, _DENSE]
        methods = [method for name, method in best if name == model and method != _DENSE]
        ratios = [[dense[n][0] / best[model, m][n][0] for n in networks] for m in methods]
        panel.imshow(
            [[log2(ratio) for ratio in line] for line in ratios],
            cmap=colours,
            vmin=-_DEEPEST,
            vmax=_DEEPEST,
            aspect="auto",
        )
        for y, line in enumerate(ratios):
            for x, ratio in enumerate(line):
                colour = "white" if abs(log2(ratio)) > 0.6 * _DEEPEST else "black"
                panel.text(x, y, f"{ratio:.3g}", ha="center", va="center", color=colour, size=8)
        panel.set_title(model, loc="left", size=10)
        panel.set_xticks(range(len(networks)), [f"{n}/s" for n in networks], size=8)
        panel.set_yticks(range(len(methods)), methods, size=8)
        panel.tick_params(length=0)
    figure.suptitle("Step of fp16, overlapped, divided by that of the method", size=11)
    save(figure, path)
    pyplot.close(figure)


RECIPES = (Pays(),)
