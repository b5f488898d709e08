"""What do the pairs of the survey's Table 5 do? Writes the table of docs/algorithms.md.

    python experiments/make_algorithms_table.py    # --check: tells whether the page is up to date

The figures are those of

    gradwire matrix --synchronization bsp "ssp(2)" asp "localsgd(4)" \
        --architecture parameter_server allreduce "gossip(ring)" "gossip(ring, adpsgd)"

in virtual time: other machines can differ by the rounding of losses only. The grades are those of
Tang et al. 2020 (arXiv 2003.06307), Table 5: model consistency, frequency and congestion of
communication, convergence.

Answer: the grades hold, but for two. asp loads a server with as many bytes per gradient as bsp, its
low congestion is that nobody waits; and local SGD with a server is as stable as with an all-reduce.
A ring of neighbours costs as many bytes in all as a server; no node is crowded.
"""

from collections.abc import Mapping
from typing import Any

import kept
from gradwire.core.units import format_bytes
from gradwire.experiment.report.comparison import format_seconds
from gradwire.experiment.studies.matrix import measure, pairs

SYNCHRONIZATION = ("bsp", "ssp(2)", "asp", "localsgd(4)")
ARCHITECTURE = ("parameter_server", "allreduce", "gossip(ring)", "gossip(ring, adpsgd)")
NAMES = {"gossip(ring, algorithm=adpsgd)": "gossip(ring, adpsgd)"}
COLUMNS = (
    "architecture",
    "synchronization",
    "the survey's grades",
    "distance of models",
    "messages per step",
    "bytes per step",
    "busiest node",
    "time per step",
    "loss at equal time",
    "loss at the end",
)
PAGE = kept.ROOT / "docs" / "algorithms.md"


def row(measured: Mapping[str, Any]) -> list[str] | None:
    """Of a pair that makes sense, written as `gradwire matrix` prints it."""
    if "refusal" in measured:
        return None
    architecture = NAMES.get(measured["architecture"], measured["architecture"])
    synchronization = measured["synchronization"]
    return [
        f"`{architecture}`",
        f"`{synchronization}`",
        ", ".join(measured["survey"].values()),
        f"{measured['distance']:.2g}",
        f"{measured['messages_per_step']:.4g}",
        format_bytes(measured["bytes_per_step"]),
        format_bytes(measured["busiest_node_bytes_per_step"]),
        format_seconds(measured["time_per_step_s"]),
        f"{measured['loss_after_equal_time']:.3g}",
        f"{measured['loss']:.3g}",
    ]


def main() -> None:
    rows = map(row, measure(pairs(SYNCHRONIZATION, ARCHITECTURE)))
    table = kept.markdown(COLUMNS, [r for r in rows if r is not None], left=3)
    kept.write_page(PAGE, kept.with_tables(PAGE.read_text(), {"matrix": table}))


if __name__ == "__main__":
    main()
