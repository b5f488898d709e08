"""Bandwidths, durations and bytes as they are written."""

import math
import re

_BITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def parse_bandwidth(text: str) -> float:
    """Bytes per second in `10Gbit`, `100Mbit`, `2.5Gbit/s`, `1Gbps`."""
    match = re.fullmatch(r"([0-9.]+)\s*([kmgt]?)\s*(?:bit(?:/s)?|bps)", text.strip().lower())
    try:
        value = float(match[1]) * _BITS[match[2]] / 8 if match else 0.0
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ValueError(
            f"bandwidth {text!r} is not understood: write it in bits per second, "
            "such as 10Gbit, 100Mbit or 2.5Gbit"
        )
    return value


def parse_duration(text: str) -> float:
    """Seconds in `50us`, `1ms`, `0.2s`."""
    match = re.fullmatch(r"([0-9.]+(?:e-?[0-9]+)?)\s*(s|ms|us|µs|ns)", text.strip().lower())
    try:
        value = float(match[1]) * _SECONDS[match[2]] if match else math.inf
        if math.isfinite(value):
            return value
    except ValueError:
        pass
    raise ValueError(f"duration {text!r} is not understood: write it like 50us, 1ms or 0.2s")


def format_bytes(count: float) -> str:
    """Decimal units, three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"
        count /= 1000
    raise AssertionError
