"""What ps-lite and BytePS say by environment variables, and `gradwire ps` understands."""

from typing import Any

import pytest

from gradwire.cli.ps import PsCommand, from_environment
from gradwire.experiment.run.config import Config

JOB = {
    "DMLC_ROLE": "worker",
    "DMLC_PS_ROOT_URI": "10.0.0.1",
    "DMLC_PS_ROOT_PORT": "9100",
    "DMLC_NUM_WORKER": "3",
    "DMLC_NUM_SERVER": "2",
    "DMLC_WORKER_ID": "1",
    "DMLC_NODE_HOST": "10.0.0.7",
}


def test_variables_hold_where_no_flag_does():
    found = from_environment(PsCommand(), JOB)
    assert (found.role, found.scheduler, found.number) == ("worker", "tcp://10.0.0.1:9100", 1)
    assert (found.config.workers, found.config.architecture) == (3, "parameter_server(2)")
    assert found.bind == ""  # a worker listens nowhere
    server = from_environment(PsCommand(), {**JOB, "DMLC_ROLE": "server"})
    assert (server.number, server.bind) == (None, "tcp://10.0.0.7:0")


def test_flags_hold_where_there_are_any():
    config = Config(workers=8, architecture='parameter_server(2, optimizer="server")')
    command = PsCommand("server", None, config, "tcp://10.0.0.9:1", 0, "tcp://10.0.0.8:7")
    assert from_environment(command, JOB) == command


def test_without_any_it_is_this_machine():
    found = from_environment(PsCommand("scheduler"), {})
    assert (found.scheduler, found.number) == ("tcp://127.0.0.1:9092", None)
    assert found.config.architecture == "parameter_server(1)"


@pytest.mark.parametrize(
    ("command", "variables", "message"),
    [
        (PsCommand(), {}, r"say what this node is.*DMLC_ROLE"),
        (PsCommand(), {"DMLC_ROLE": "joint"}, "not 'joint'"),
        (PsCommand("worker"), {"DMLC_NUM_WORKER": "two"}, "DMLC_NUM_WORKER must be a number"),
        (PsCommand("worker"), {"DMLC_PS_ROOT_PORT": "-1"}, "DMLC_PS_ROOT_PORT must be a number"),
        (
            PsCommand("worker", config=Config(architecture="parameter_server(3)")),
            {"DMLC_NUM_SERVER": "2"},
            r"DMLC_NUM_SERVER is 2, but parameter_server\(3\) has 3",
        ),
        (PsCommand("worker", config=Config(architecture="ring")), {}, "ring has no servers"),
    ],
)
def test_what_cannot_be(command: PsCommand, variables: dict[str, str], message: str):
    with pytest.raises(ValueError, match=message):
        from_environment(command, variables)


def test_a_worker_that_there_is_not(capsys: Any):
    from gradwire.experiment.processes.node.types import RunFolder
    from gradwire.experiment.processes.served import NodeOptions, take_part

    config = Config(engine="process", architecture="parameter_server(1)", workers=2, steps=1)
    place = NodeOptions("worker", "tcp://127.0.0.1:1", number=2)
    with pytest.raises(ValueError, match="there is no worker number 2: there are 2, from 0"):
        take_part(config, place, RunFolder(None))
