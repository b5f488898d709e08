"""How do all codecs compare? Measures them and writes docs/codecs.md.

    python experiments/make_codecs_page.py            # measures, keeps the figures, writes the page
    python experiments/make_codecs_page.py --missing  # measures what has no figures yet, the same
    python experiments/make_codecs_page.py --write    # writes the page again from kept figures
    python experiments/make_codecs_page.py --check    # tells whether the page is up to date

Figures are those of `gradwire codecs --json`, kept in experiments/codecs.json. What each method
does and when to use it is said in its own file: the page shows the documentation of its module.

Answer: docs/codecs.md.
"""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import kept
from gradwire.compression import COMPRESSION
from gradwire.core.codec import Algebra, Codec, Compression
from gradwire.core.notation import notation_name
from gradwire.core.spec import Spec
from gradwire.experiment.studies.codecs import (
    CHAINS,
    REAL,
    formatted,
    formatted_reducer,
    measure,
    methods,
)
from gradwire.experiment.studies.gradients import saved_facts

KEPT = kept.ROOT / "experiments" / "codecs.json"
PAGE = kept.ROOT / "docs" / "codecs.md"
FAMILIES = {  # the folders of compression/, as headings; others follow under their own name
    "": "Plain and general",
    "quantization": "Quantisers",
    "source_coding": "Source coding",
    "sparsification": "Sparsifiers",
    "lowrank": "Low rank",
    "coders": "Coders of symbols",
    "feedback": "Feedback",
}
KINDS = {"gaussian": "Gaussian", "laplacian": "Laplacian", REAL: "saved gradients"}
ROADS = {
    Algebra.LINEAR: "Payloads add: an all-reduce averages them compressed.",
    Algebra.MERGE: "Payloads merge, up a tree.",
    Algebra.OPAQUE: "Payloads are gathered, or scattered to shard owners, and decoded.",
}
NUMBER = 1 << 20  # elements for which bounds are stated
INTRO = """# Codecs

Made by `python experiments/make_codecs_page.py`; do not edit. `gradwire codecs` prints these
figures for your machine, `gradwire codecs --only "topk(0.1) >> fp16"` those of anything you write.

Every codec is written as in its first example. It gets {numel:,} Gaussian and as many Laplacian
elements, and {num_real} gradients saved from training ({gradients}),
whose bits are those of all together and whose errors are averages. Bits per element are the length
of the packed payload, header included. NMSE is |C(x) - x|^2 / |x|^2, cosine that of the angle
between C(x) and x, both for one draw where the codec is random. An unbiased codec may have a large
NMSE and still train, since errors average out over workers and steps; a biased one wants `ef(...)`.
A codec that waits for later steps, or whose scale is left to the learning rate, has an NMSE that
says little.
"""
SPEED = """
## Speed

One thread, best of a few, {processor}, kernels {kernels}, torch {torch}. GB/s are of float32
elements; /copy is the time over that of a memcpy of the same vector at the same moment. The saved
gradients are short (17,226 to 58,624 elements) and lie in the cache: there the cost of a call
shows.
"""
REDUCERS = """
## Reducers

What is more than one message or keeps a memory: {workers} workers average one weight matrix of
{numel:,} elements (late in nanogpt's training), the same gradients for {steps} steps. Bits are
what a worker sends per element and step, all messages and both directions of a reduction counted
at their sender. The error after {steps} steps is that of the sum of all that was applied.
Methods with a momentum of their own give a step, not a mean: no error is shown for them.
"""


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:] == ["--missing"]:
        _measure_missing()
    elif not sys.argv[1:]:
        measured = measure(_methods(), progress=_progress)
        measured["commit"] = kept.commit()
        KEPT.write_text(kept.compact(measured))
    kept.write_page(PAGE, page(json.loads(KEPT.read_text())))


def _classes() -> list[type[Compression]]:
    """Those of this package: plugins have pages of their own."""
    return [COMPRESSION[name] for name in COMPRESSION.builtin_names()]


def _methods() -> list[str]:
    """As written where all are measured, without those of plugins."""
    own = {(cls.examples or (notation_name(cls),))[0] for cls in _classes()}
    return [text for text in methods() if text in own or text in CHAINS]


def _measure_missing() -> None:
    """Adds figures of methods that have none, and drops those of methods that are gone."""
    before = json.loads(KEPT.read_text())
    written = [repr(COMPRESSION.parse(text)) for text in _methods()]
    parts = ("codecs", "reducers")
    known = {row["method"] for part in parts for row in before[part]}
    missing = [text for text in written if text not in known]
    new = measure(missing, before["numel"], _progress) if missing else {}
    for part in parts:
        rows = [row for row in [*before[part], *new.get(part, [])] if row["method"] in written]
        before[part] = sorted(rows, key=lambda row: written.index(row["method"]))
    KEPT.write_text(kept.compact(before))


def _progress(method: str, done: int, total: int) -> None:
    print(f"{done}/{total} {method}", file=sys.stderr, flush=True)


def page(measured: dict[str, Any]) -> str:
    codecs = [row for row in measured["codecs"] if row["input"] in KINDS]
    rows = {(row["method"], row["input"]): formatted(row) for row in codecs}
    methods = list(dict.fromkeys(row["method"] for row in codecs))
    gradients = sorted({name.rpartition(" ")[0] for name in saved_facts()})
    header = {"num_real": len(saved_facts()), "gradients": ", ".join(gradients)}
    text = INTRO.format(numel=measured["numel"], **header)
    columns = [f"{what}, {kind}" for kind in KINDS.values() for what in ("bits", "NMSE", "cosine")]
    text += _table(
        columns,
        {method: [cell for kind in KINDS for cell in rows[method, kind][:3]] for method in methods},
    )
    text += SPEED.format(
        processor=measured["processor"],
        kernels=measured["kernels"],
        torch=measured["versions"]["torch"],
    )
    columns = [
        f"{what}, {kind}"
        for kind in ("Gaussian", "saved gradients")
        for what in ("encode GB/s", "decode GB/s", "encode /copy", "decode /copy")
    ]
    text += _table(
        columns,
        {
            method: [cell for kind in ("gaussian", REAL) for cell in rows[method, kind][3:]]
            for method in methods
        },
    )
    if measured["reducers"]:
        first = measured["reducers"][0]
        text += REDUCERS.format(**{name: first[name] for name in ("workers", "numel", "steps")})
        text += _table(
            ["bits", "NMSE, 1 step", f"NMSE, {first['steps']} steps", "cosine"],
            {row["method"]: formatted_reducer(row) for row in measured["reducers"]},
        )
    return text + "".join(_families())


def _table(columns: Sequence[str], rows: dict[str, list[str]]) -> str:
    lines = [
        f"| method | {' | '.join(columns)} |",
        "|---|" + "---:|" * len(columns),
        *(f"| `{_cell(method)}` | {' | '.join(cells)} |" for method, cells in rows.items()),
    ]
    return "\n" + "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")  # in a table it would end the cell, also within code


def _families() -> Iterator[str]:
    families: dict[str, list[type[Compression]]] = {family: [] for family in FAMILIES}
    for cls in _classes():
        below = cls.__module__.removeprefix("gradwire.compression.").split(".")
        families.setdefault(below[0] if len(below) > 1 else "", []).append(cls)
    for family, classes in families.items():
        if classes:
            yield f"\n## {FAMILIES.get(family, family.replace('_', ' ').capitalize())}\n"
        for cls in classes:
            yield paragraph(cls)


def paragraph(cls: type[Compression]) -> str:
    """One method: how it is written, what it does and when to use it, how it travels, its paper."""
    name = notation_name(cls)
    examples = cls.examples or (name,)
    module = sys.modules[cls.__module__]
    lines = [f"\n### {name}", "", f"{cls.summary()} Write "]
    lines[-1] += ", ".join(f"`{example}`" for example in examples) + "."
    lines += ["", _markdown(module.__doc__ or ""), "", *_facts(COMPRESSION.parse(examples[0]))]
    if cls.paper:
        lines += ["", f"Paper: {cls.paper}."]
    return "\n".join(lines) + "\n"


def _facts(compression: Compression) -> list[str]:
    if not isinstance(compression, Codec):
        return ["A reducer: it keeps a memory, takes several messages or is made of others."]
    guarantee = compression.guarantee(Spec((NUMBER,), torch.float32))
    road = ROADS[compression.algebra]
    if guarantee.omega == 0:
        return [f"{road} Lossless."]
    if guarantee.omega is not None:
        return [
            f"{road} Unbiased, so it can do without feedback; relative variance at most "
            f"{guarantee.omega:.3g} for `{compression!r}` on {NUMBER:,} elements."
        ]
    if guarantee.delta is not None and guarantee.delta > 0.99:
        held = ""
        if guarantee.within is not None:
            low, high = guarantee.within
            held = f" where elements are zero or have magnitudes of {low:.3g} to {high:.5g}"
        return [f"{road} It loses at most {1 - guarantee.delta:.2g} of the squared norm{held}."]
    if guarantee.delta is not None:
        return [
            f"{road} Biased: use it within `ef(...)`. A contraction with delta at least "
            f"{guarantee.delta:.3g} for `{compression!r}` on {NUMBER:,} elements."
        ]
    return [f"{road} No bound on its error is stated."]


def _markdown(docstring: str) -> str:
    """The text with what Markdown would take for markup escaped, but for code."""
    paragraphs = []
    for text in docstring.strip().split("\n\n"):
        if not text.startswith("    "):
            pieces = text.split("`")  # every second one is code
            pieces[::2] = [re.sub(r"([*_<\\\[\]|])", r"\\\1", piece) for piece in pieces[::2]]
            text = "".join(_broken("`".join(pieces).splitlines()))
        paragraphs.append(text)
    return "\n\n".join(paragraphs)


def _broken(lines: list[str]) -> Iterator[str]:
    """Lines that are set with spaces, as formulas are, stay lines of their own."""
    spaced = [bool(re.search(r"\S {2,}\S", line)) for line in lines]
    for i, line in enumerate(lines):
        last = i + 1 == len(lines)
        yield line if last else line + ("\\\n" if spaced[i] or spaced[i + 1] else "\n")


if __name__ == "__main__":
    main()
