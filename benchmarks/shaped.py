"""Hosts on this machine whose links carry so many bits per second: namespaces, veth and tc tbf.

Every host has one cable to a switch, limited each way, so that hosts share nothing but their own
cable with those who talk to them at the same time. The switch is a namespace with an address, too:
whoever runs there has no cable of its own to wait for. Needs Linux, root, and the commands ip and
tc.
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

WIRE = "wire"  # a host's end of its cable
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Host:
    namespace: str
    address: str


def enter(host: Host) -> None:
    """This thread, and those that it starts, are on that host from now on."""
    with open(f"/run/netns/{host.namespace}") as file:
        # `os.setns` is not there before Python 3.12.
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {host.namespace}")


def inside(host: Host | None, function: Callable[..., None], *args: Any) -> None:
    """Calls the function, on that host if there is one: what a new process runs."""
    if host is not None:
        enter(host)
    function(*args)


def missing() -> str | None:
    """Why there can be no such hosts here; None: there can."""
    if not sys.platform.startswith("linux") or os.geteuid():
        return "network namespaces need Linux and root"
    absent = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"these commands are missing: {', '.join(absent)} (iproute2)" if absent else None


def num_bytes_sent() -> int:
    """What has left the host on which this process is, with all headers, as tc counts it."""
    shown = subprocess.run(
        f"tc -s -j qdisc show dev {WIRE}".split(), check=True, capture_output=True
    )
    return sum(row["bytes"] for row in json.loads(shown.stdout) if row.get("root"))


@contextmanager
def shaped(
    mbit: float | None, num_hosts: int, burst: str = "64kb", card: str = "latency 50ms"
) -> Iterator[tuple[Host, Sequence[Host]]]:
    """The switch, and hosts with a link of so much each way. All are removed in any case.

    Without a number links have no limit; bytes are counted nevertheless. `card`: what waits at most
    at a host's own end. With "limit 64mb" programs wait there, and nothing is dropped.
    """
    switch, *hosts = (
        Host(f"gradwire-{os.getpid()}-{number}", f"10.203.77.{number + 1}")
        for number in range(num_hosts + 1)
    )
    at_port = at_card = "root pfifo limit 10000"
    if mbit is not None:
        at_port = f"root tbf rate {mbit}mbit burst {burst} latency 50ms"
        at_card = f"root tbf rate {mbit}mbit burst {burst} {card}"
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for host in (switch, *hosts):
            _run(f"ip netns add {host.namespace}")
            _run(f"ip -n {host.namespace} link set lo up")
        at_switch = f"-n {switch.namespace}"
        _run(f"ip {at_switch} link add {WIRE} type bridge")
        _set_up(switch)
        for number, host in enumerate(hosts):
            port, at_host = f"port{number}", f"-n {host.namespace}"
            ends = f"name {WIRE} netns {host.namespace} type veth peer name {port}"
            _run(f"ip link add {ends} netns {switch.namespace}")
            _run(f"ip {at_switch} link set {port} master {WIRE} up")
            _set_up(host)
            _run(f"tc {at_switch} qdisc add dev {port} {at_port}")
            _run(f"tc {at_host} qdisc add dev {WIRE} {at_card}")
        yield switch, hosts
    finally:
        for host in (switch, *hosts):  # with them go bridge and cables
            _run(f"ip netns del {host.namespace}", check=False)
        signal.signal(signal.SIGTERM, before)


def _set_up(host: Host) -> None:
    _run(f"ip -n {host.namespace} addr add {host.address}/24 dev {WIRE}")
    _run(f"ip -n {host.namespace} link set {WIRE} up")


def _run(command: str, check: bool = True) -> None:
    subprocess.run(command.split(), check=check, stderr=None if check else subprocess.DEVNULL)
