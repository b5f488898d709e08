"""The costs of coding that the simulator charges, read from a file.

`coding_costs.json` comes with the package: `calibration.py` measured it once, on the machine that
it names, with one thread. So the same configuration gives the same virtual times everywhere.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradwire.core.metering import DECODE, ENCODE, PACK, UNPACK, VECTOR
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.record import Row
from gradwire.runtime.virtual.coding_time import (
    CodingTime,
    Cost,
    CostTable,
    MeasuredCoding,
    ModelledCoding,
)

FILE = Path(__file__).with_name("coding_costs.json")
FORMAT = 2
_OTHERS, _LEAST = (VECTOR, PACK, UNPACK), (ENCODE, DECODE)


@dataclass(frozen=True)
class CodingCosts:
    """A file of costs."""

    table: CostTable
    hardware: str
    digest: str  # of the file


def read_costs(path: str) -> CodingCosts:
    """The costs in a file; an empty path is the file that comes with the package."""
    file = Path(path) if path else FILE
    try:
        content = file.read_bytes()
        written = json.loads(content)
        if written["format"] != FORMAT:
            raise ValueError(f"format {written['format']}, expected {FORMAT}")
        table = CostTable(
            {name: _costs(own, _LEAST) for name, own in written["codecs"].items()},
            _costs(written["functions"], ()),
            _costs(written["others"], _OTHERS),
            _costs(written["default"], _LEAST),
        )
        hardware = str(written["hardware"])
    except OSError as error:
        raise ValueError(f"coding_costs: {file} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"coding_costs: {file} is no table of coding costs ({type(error).__name__}: {error}). "
            f"Make one: gradwire codecs --costs {file}"
        ) from None
    return CodingCosts(table, hardware, hashlib.blake2b(content, digest_size=8).hexdigest())


def _costs(written: Mapping[str, Sequence[float]], needed: Sequence[str]) -> dict[str, Cost]:
    costs = {name: Cost(*map(float, numbers)) for name, numbers in written.items()}
    for name, cost in costs.items():
        if not all(0 <= number < math.inf for number in cost):
            raise ValueError(f"{name}: costs must be finite and not negative, got {list(cost)}")
    missing = [name for name in needed if name not in costs]
    if missing:
        raise ValueError(f"there is no {' and no '.join(missing)} in {list(costs)}")
    return costs


@dataclass(frozen=True)
class Charge:
    """How a run charges coding."""

    time: CodingTime | None  # None: it is free
    record: Row  # for the summary


def charge_of(config: Config) -> Charge:
    """The charge that a configuration asks for."""
    slowdown = config.coding_slowdown
    record: Row = {"charged": config.coding}
    if config.coding == "free":
        return Charge(None, record)
    record["slowdown"] = slowdown
    if config.coding == "measured":
        return Charge(MeasuredCoding(slowdown), record)
    costs = read_costs(config.coding_costs)
    record |= {"hardware": costs.hardware, "threads": 1, "costs_digest": costs.digest}
    return Charge(ModelledCoding(costs.table, slowdown), record)


def describe_charge(record: Row) -> str:
    """A description of the record of a charge."""
    if record["charged"] == "free":
        return "free (encoding, averaging and updating take no virtual time)"
    times = "" if record["slowdown"] == 1.0 else f", {record['slowdown']:g} times as long"
    if record["charged"] == "measured":
        return f"measured here and now{times}"
    return f"modelled, {record['hardware']}, one thread{times}"
