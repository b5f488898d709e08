"""Who has the keys of a job, and who has not."""

import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import zmq

from gradwire.runtime.process.transport import ARRIVED
from gradwire.runtime.zeromq import JoinError, load_keys, make_keys
from gradwire.runtime.zeromq import messages as msg
from gradwire.runtime.zeromq.keys import JobKeys, descriptor_path, throwaway_keys
from runtime.process.zeromq.jobs import Job, job, next_of


def test_keys_are_written_for_their_owner_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    made = make_keys(path)
    assert load_keys(path) == made
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert made.binding_secret.decode() not in repr(made)
    assert make_keys(tmp_path / "others") != made
    with pytest.raises(FileExistsError, match="exists"):
        make_keys(path)
    path.chmod(0o644)
    with pytest.raises(PermissionError, match="chmod 600"):
        load_keys(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: "\n".join(text.splitlines()[:-1]), "lacks connecting_secret"),
        (lambda text: text.replace("binding_public", "public"), "no key of a job"),
        (lambda text: text + "more\n", "no key of a job"),
        (lambda text: text[:-10] + "\n", "no key of a job"),
        (lambda text: text[:-12] + "0" * 11 + "\n", "damaged"),
    ],
)
def test_files_that_are_damaged(tmp_path: Path, change: Callable[[str], str], message: str) -> None:
    path = tmp_path / "keys"
    make_keys(path)
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError, match=message):
        load_keys(path)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@needs_root
def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    make_keys(path)
    os.chown(path, 12345, -1)
    with pytest.raises(PermissionError, match=f"belong to user 12345.* chown {os.geteuid()} "):
        load_keys(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no file"):
        load_keys(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ValueError, match="is no file"):  # and it is not waited for
        load_keys(tmp_path / "pipe")


def read_in_a_child(descriptor: int) -> str:
    text = (
        "from gradwire.runtime.zeromq.keys import load_keys\n"
        f"print(load_keys({descriptor_path(descriptor)!r}).binding_secret.decode())"
    )
    command = [sys.executable, "-c", text]
    return subprocess.run(
        command, pass_fds=[descriptor], check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.slow
def test_throwaway_keys_are_read_by_children_and_are_in_no_folder() -> None:
    with throwaway_keys() as descriptor:
        status = os.fstat(descriptor)
        assert (stat.S_IMODE(status.st_mode), status.st_nlink) == (0o600, 0)
        own = load_keys(descriptor_path(descriptor)).binding_secret.decode()
        assert [read_in_a_child(descriptor).strip() for _ in range(2)] == [own, own]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@needs_root
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_throwaway_keys_cannot_be_read_by_another_user() -> None:
    with throwaway_keys() as descriptor:
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        text = f"import os; os.setgroups([]); os.setgid(12345); os.setuid(12345); open({path!r})"
        ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
        assert "PermissionError" in ended.stderr


@pytest.mark.slow
def test_a_job_with_keys(tmp_path: Path) -> None:
    keys, others = make_keys(tmp_path / "keys"), make_keys(tmp_path / "others")
    with job(1, keys=keys) as made:
        worker, server = made.nodes[0], made.nodes[1]
        sent = torch.arange(100_000.0)
        worker.send(1, 0, 0, sent)
        assert torch.equal(next_of(server, ARRIVED).message, sent)
        half = JobKeys(keys.binding_public, keys.binding_secret, *_pair(others))
        for name, stranger in (("none", None), ("others", others), ("half", half)):
            for address in (made.scheduler_address, server.address):
                answered = _knock(address, stranger, made)
                assert not answered, f"with {name} keys"
        assert not server.refused  # it did not even hear of it
        assert not made.nodes[2].refused
        with pytest.raises(JoinError, match="same keys"):
            made.start("worker", keys=half, join_s=0.5)


def _pair(keys: JobKeys) -> tuple[bytes, bytes]:
    return keys.connecting_public, keys.connecting_secret


def _knock(address: str, keys: JobKeys | None, made: Job) -> bool:
    """Whether a stranger gets any answer to what a member would be answered."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    identity = b"stranger" * 2
    dealer.routing_id = identity
    if keys is not None:
        dealer.curve_serverkey = keys.binding_public
        dealer.curve_publickey, dealer.curve_secretkey = _pair(keys)
    dealer.connect(address)
    request = msg.JoinRequest(identity, msg.WORKER, 0, made.num_workers, made.num_servers, "")
    local = made.nodes[0]._local
    for _ in range(3):
        head = msg.Header(msg.JOIN, local.job).pack()
        with suppress(zmq.Again):
            dealer.send_multipart([head, msg.pack_body(request)], zmq.NOBLOCK)
        if dealer.poll(60):
            return True
    context.destroy(linger=0)
    return False


def test_keys_do_not_hold_up_the_end(tmp_path: Path) -> None:
    before = threading.active_count()
    with job(1, keys=make_keys(tmp_path / "keys")) as made:
        began = time.monotonic()
        made.close()
        assert time.monotonic() - began < 2
    assert threading.active_count() <= before
