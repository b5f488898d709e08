"""`gradwire run` whose nodes have no keys: then messages of strangers reach the scheduler's
membership, and are not turned away in the handshake.

    python tests/soak/keyless.py run --architecture "parameter_server(2)" ...
"""

from collections.abc import Callable, Sequence

from gradwire.cli import main, processes
from gradwire.experiment.processes.launch.children import Failure
from gradwire.experiment.processes.launch.role_launcher import Command, Roles, launch_roles


def without_keys(
    roles: Roles, command: Command, restarts: int = 0, say: Callable[[str], None] = print
) -> Failure | None:
    def node(role: str, number: int, scheduler: str, keys: str, goes_on: bool) -> Sequence[str]:
        words = list(command(role, number, scheduler, keys, goes_on))
        at = words.index("--keys")
        return words[:at] + words[at + 2 :]

    return launch_roles(roles, node, restarts, say)


if __name__ == "__main__":
    processes.launch_roles = without_keys
    main()
