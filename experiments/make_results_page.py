"""What came of the published tables, measured again? Writes docs/results.md and docs/pays.png.

    python experiments/make_results_page.py    # --check: tells whether the page is up to date

Rows are those that `gradwire repro NAME --scale SCALE --keep experiments/results` has kept, with
hardware and commit. Of each recipe the largest scale is shown of which there are rows.
"""

from collections.abc import Mapping, Sequence

import kept
from gradwire.experiment.repro.kept import kept_rows
from gradwire.experiment.repro.recipe import Recipe, Row, recipes
from gradwire.experiment.repro.scale import SCALES, Scale
from gradwire.experiment.repro.trained import Cell, Trained

PAGE = kept.ROOT / "docs" / "results.md"
RESULTS = kept.ROOT / "experiments" / "results"
INTRO = """\
# Published tables, measured again

Published figures stand beside ours. [repro.md](repro.md) says how to measure them yourself.

This page is written by `experiments/make_results_page.py` from the rows in `experiments/results`.
Of each recipe it shows the largest scale that has been run. `full` is the whole table; `small`
trains for less time or measures a part of it, so its figures are no reproduction; `smoke` only
shows that a recipe works. What has not been run is said.

"""
# What was chosen, what differs from the source, and why.
NOTES: Mapping[str, str] = {
    "thesis-mnist": """\
The thesis compares no compression, 16 bits and its own "1bit" on MNIST. It prints the code of two
compressors, which are run here as they are printed. The first sends whether an element is zero,
without its sign, so what is applied moves all parameters one way; the thesis reports 95.8% for
"1bit". The other rows are the algorithms that it announces, in the form of their papers. The
thesis's times are those of its machine; ours are virtual, on a network that is stated, so
the two cannot be compared in seconds. Bytes count both ways: where the server answers with the mean
as it is, no method can save more than half. "Measured time" was taken on a machine that did other
work, too.
""",
    "thesis-rd": """\
The thesis names no construction of its polar codes. Ours finds free positions by simulation, so
figures differ at equal rate and length. The longer lengths are ours, on the way to the bound.
""",
    "table5": """\
The survey grades pairs in words. Each pair that makes sense is run, and beside each word stands a
figure: the distance of the workers' models, messages, bytes of the busiest node, the loss after
equal virtual time. Where the survey has a dash the pair is refused.
""",
    "table6": """\
The survey's formulas, the simulator, and ranks on one machine. The ratio is that of simulator and
formula. Ranks on one machine are no network: a message costs them processor time, and they share
the cores with each other and with whatever else runs there.
""",
    "table9": """\
The survey counts bits of all T steps, in big O; here are bytes of one step. Three things differ.
It gives the server of local SGD O(32N T/tau), without the factor n that it gives the server of BSP;
here the server talks to all n workers under both. It leaves out what a worker receives, which is
the whole model. And for a quantised all-reduce it has O(bNT): a model as small as this one is
gathered, so each worker sends n - 1 payloads (from 16,384 elements in a shard on they are
scattered, at less than two payloads per worker). Pairs that the survey marks by a dash are run
where they make sense.
""",
    "pays": """\
Agarwal et al. 2022 measure on GPUs in data centres. Here gradients and coding are those of one CPU
core, and the models are small, so the figures are not theirs; the question is.
""",
    "foundation": """\
No paper has this table: each uses a model and data of its own. All methods see the same batches,
so losses are at equal tokens. Learning rates are not tuned for each method.
""",
    "localsgd-unsent": """\
With local SGD and top-k the survey reports 8 to 10 points more than with BSP and top-k, both
without feedback. It does not say what becomes of the part of a round that is not sent. Either it
is lost, or it stays in the worker's model and is in the next change, too (`unsent="kept"`). The
tables of the survey take the first until this one has been run.
""",
    "survey-table2": "Synchronization alone: no compression.\n",
    "survey-table3": "Numbers of workers, at equal epochs: more workers take fewer steps.\n",
    "survey-table4": "Means and deviations over seeds, with 32 workers.\n",
    "survey-table7": "All-reduce against gossip on a ring.\n",
    "survey-table8": "All methods, compressed and not, with 4 and 32 workers.\n",
}
ORDER = (
    *("thesis-mnist", "thesis-rd", "table5", "table6", "table9"),
    *("survey-table2", "survey-table3", "survey-table4", "survey-table7", "survey-table8"),
    *("localsgd-unsent", "foundation", "pays"),
)


def page() -> str:
    assert {*ORDER} == {*recipes()}, "a recipe has no place on the page"
    return INTRO + "\n".join(section(recipes()[name]) for name in ORDER)


def section(recipe: Recipe) -> str:
    scale, rows = largest(recipe.name)
    parts = [f"## {recipe.title}", "", NOTES[recipe.name]]
    parts += [" ".join(recipe.choices.split()), ""]
    if scale is None:
        parts += [f"**Not run yet.** {command(recipe.name, 'full')}", ""]
        return "\n".join(parts)
    parts += [state(recipe, scale, rows), "", command(recipe.name, scale), ""]
    for table in recipe.tables(rows):
        parts += [table.markdown(), ""]
    if recipe.name == "pays":
        parts += ["![Steps of fp16 against those of each method](pays.png)", ""]
    return "\n".join(parts)


def largest(name: str) -> tuple[Scale | None, list[Row]]:
    """The largest scale of which there are rows, and these."""
    for scale in reversed(SCALES):
        rows = list(kept_rows(RESULTS / f"{name}.jsonl", scale))
        if rows:
            return scale, rows
    return None, []


def state(recipe: Recipe, scale: Scale, rows: Sequence[Row]) -> str:
    """The scale, what of it has been run, where."""
    text = f"Scale **{scale}**"
    if isinstance(recipe, Trained):
        done = {(row["line"], row["column"]) for row in rows}
        text += f", {missing([*recipe.cells(scale)], done)}"
        if scale != "full":
            num_full = len([*recipe.cells("full")])
            text += f". None of the {num_full} cells of the full scale was run"
    elif scale != "full":
        text += "; the full scale has not been run"
    places = dict.fromkeys(
        f"{row.get('gpu') or row['processor']}, torch {row['torch']}, "
        f"commit {row.get('commit', 'unknown')}"
        for row in rows
    )
    return f"{text}. Measured on {'; '.join(places)}."


def missing(cells: Sequence[Cell], done: set[tuple[str, str]]) -> str:
    left = [cell.name for cell in cells if (cell.line, cell.column) not in done]
    if not left:
        return f"all {len(cells)} cells"
    shown = "; ".join(left[:8]) + ("; ..." if len(left) > 8 else "")
    return f"{len(cells) - len(left)} of {len(cells)} cells. Not run: {shown}"


def command(name: str, scale: Scale) -> str:
    return f"`gradwire repro {name} --scale {scale}`"


def main() -> None:
    scale, rows = largest("pays")
    if scale is not None and not kept.checks():
        recipes()["pays"].draw(rows, PAGE.parent)
    kept.write_page(PAGE, page())


if __name__ == "__main__":
    main()
