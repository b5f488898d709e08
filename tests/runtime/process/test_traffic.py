"""The ledger has the bytes that really leave: those that the loopback interface counts.

In a network namespace of its own, so that nobody else's bytes are counted.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from runtime.process.launching import launch
from runtime.process.traffic_cases import CASES, SERVED_NUMEL
from sampling import slow


@pytest.fixture
def namespace() -> Iterator[str]:
    name = f"gradwire-{os.getpid()}"
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and the command ip, to make a network namespace")
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"cannot make a network namespace: {made.stderr.strip()}")
    try:
        up = ["ip", "-n", name, "link", "set", "lo", "up"]
        subprocess.run(up, check=True, capture_output=True)
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


@pytest.mark.parametrize(
    ("function", "size", "cases"),
    [("run", 3, CASES), slow("run_served", 4, [("parameter_server", "identity", SERVED_NUMEL)])],
)
def test_bytes_on_the_interface(
    namespace: str, tmp_path: Path, function: str, size: int, cases: Sequence[tuple[str, str, int]]
) -> None:
    within = ("ip", "netns", "exec", namespace)
    where = f"runtime.process.traffic_cases:{function}"
    codes, results = launch(tmp_path, size, where, 60, within)
    assert codes == [0] * size
    for case, seen in zip(cases, zip(*results), strict=True):
        ledger, sent = (sum(one[name] for one in seen) for name in ("ledger", "transport"))
        interface = max(one["interface"] for one in seen)
        print(
            f"{case}: ledger {ledger}, with frames {sent} ({sent / ledger - 1:+.3%}), "
            f"on the interface {interface} ({interface / sent - 1:+.3%})"
        )
        assert ledger > 4 << 20
        assert ledger < sent < 1.001 * ledger  # 40 bytes or so per message
        assert sent < interface < 1.03 * sent
