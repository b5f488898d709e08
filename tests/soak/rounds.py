"""Rounds of a soak: a run is disturbed, resumed until it is done, and checked.

Everything that is drawn follows from the seed and the number of the round; what processes make of
it also depends on their timing.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soak import actions, checks, watch
from soak.actions import Action, Broken
from soak.disk import Disk
from soak.jobs import JOBS, Job, Launch, is_finished
from soak.watch import Peak, Sampler

_LAUNCH_S = 240.0  # at most, from start to end
_MAX_LAUNCHES = 10  # of one round
_MAX_UNDISTURBED = 3  # launches that fail although nothing was done to them
_MAX_OPEN = 2  # actions on a job without keys
_RESTARTS = (0, 2, 4)


@dataclass
class Round:
    """What happened."""

    number: int
    job: Job
    seconds: float = 0.0
    num_launches: int = 0
    codes: list[int] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    planned: int = 0
    peaks: dict[str, Peak] = field(default_factory=dict)
    num_lost: int = 0  # launches that found no checkpoint any more, after a full disk
    num_updates: int = 0  # that were on disk when a job ended, and counted in the next
    outcome: str = ""


@dataclass(frozen=True)
class Usual:
    """An undisturbed run: its memory and descriptors by role, and its model."""

    peaks: dict[str, Peak]
    model: Any


class Soak:
    def __init__(self, seed: int, place: Path) -> None:
        self.seed, self.place = seed, place
        self.disk = Disk(place)
        self.rounds: list[Round] = []
        self._usual: dict[str, Usual] = {}

    def usual(self, job: Job) -> Usual:
        if job.name not in self._usual:
            place = self.place / f"usual-{job.name}"
            launch, peaks = self._launch(job, place, [], [])
            checks.check_exit(launch, launch.code or 0, [])
            if not is_finished(place / "run"):
                raise Broken(f"an undisturbed run failed:\n{launch.said}")
            self._usual[job.name] = Usual(peaks, checks.model_of(place / "run"))
            print(f"undisturbed {job.name}: {_peaks(peaks)}", flush=True)
            shutil.rmtree(place)
        return self._usual[job.name]

    def round(self, number: int, job_name: str = "") -> Round:
        """One run, from its first launch to its end."""
        rng = random.Random(f"{self.seed}/{number}")
        job = rng.choice(JOBS)
        job = next((one for one in JOBS if one.name == job_name), job)
        planned = [actions.draw(rng, job, self.disk.can_fill) for _ in range(rng.randrange(2, 7))]
        if not job.has_keys:  # it must not end meanwhile: strangers may take ranks that are left
            planned = planned[:_MAX_OPEN]
        restarts = [rng.choice(_RESTARTS) for _ in range(_MAX_LAUNCHES)]
        began_s = time.monotonic()
        round_ = Round(number, job, planned=len(planned))
        self.rounds.append(round_)
        place = self.place / f"round-{number}"
        try:
            self._disturb(round_, place, planned, restarts, self.usual(job))
            round_.outcome = "ok"
            shutil.rmtree(place)
        except Broken as error:
            round_.outcome = f"BROKEN: {error}"
        except Exception:
            round_.outcome = f"BROKEN: the soak itself failed\n{traceback.format_exc()}"
        round_.seconds = time.monotonic() - began_s
        return round_

    def _disturb(
        self,
        round_: Round,
        place: Path,
        planned: list[Action],
        restarts: list[int],
        usual: Usual,
    ) -> None:
        job, folder = round_.job, place / "run"
        queue, num_in_vain = list(planned), 0
        more: list[str] = []
        before: list[str] = []
        updates: checks.Updates = {}
        said = ""
        while not is_finished(folder):
            if round_.num_launches == _MAX_LAUNCHES or num_in_vain == _MAX_UNDISTURBED:
                raise Broken(
                    f"not done after {round_.num_launches} launches: {round_.codes}\n{said[-4000:]}"
                )
            done: list[str] = []
            options = ["--restarts", str(restarts[round_.num_launches]), *more]
            launch, peaks = self._launch(job, place, options, queue, done)
            said = launch.said
            round_.num_launches += 1
            code = launch.code
            assert code is not None
            round_.codes.append(code)
            round_.done += done
            for role, peak in peaks.items():
                highest = round_.peaks.get(role, Peak())
                round_.peaks[role] = Peak(*map(max, zip(highest, peak)))
            num_in_vain = 0 if done else num_in_vain + 1
            checks.check_exit(launch, code, done, before)
            before = done
            if checks.lost_checkpoints(launch):
                round_.num_lost += 1
                print("    its checkpoints are lost", flush=True)
            checks.check_nothing_left(launch)
            if code == 0 and not is_finished(folder):
                raise Broken("exit code 0, and the run is not finished")
            if job.counts_updates:
                updates = self._check_updates(round_, launch, updates)
            more = ["--restart"] if checks.needs_consent(launch) else []
        checks.check_finished(job, folder, usual.model)
        checks.check_peaks(round_.peaks, usual.peaks)
        is_whole = round_.num_launches == 1 and "starting again\n" not in launch.said
        if job.is_durable and is_whole and not _lost_workers(folder):
            checks.check_counted_once(job, folder)

    def _check_updates(
        self, round_: Round, launch: Launch, before: checks.Updates
    ) -> checks.Updates:
        """Every update that was on disk when the last job ended is in the job after it, once."""
        job, folder = round_.job, launch.folder
        if not folder.exists():
            return before
        begun, now = checks.saved_updates(folder, job), checks.durable_updates(folder, job)
        code = launch.code
        has_begun = any(begun.values()) or not any(before.values())
        is_exact = code in (0, -9) and "starting again\n" not in launch.said and launch.trained
        for rank, count in before.items():
            if now[rank] < count:
                raise Broken(f"server rank {rank}: {now[rank]} updates, there had been {count}")
            if is_exact and has_begun and begun[rank] != count:
                raise Broken(f"server rank {rank} began with {begun[rank]} updates, not {count}")
        if code != 0:
            round_.num_updates += sum(now.values()) - sum(before.values())
        return now

    def _launch(
        self,
        job: Job,
        place: Path,
        options: list[str],
        queue: list[Action],
        done: list[str] | None = None,
    ) -> tuple[Launch, dict[str, Peak]]:
        """To its end. Takes actions off the queue, and says which were done."""
        place.mkdir(exist_ok=True)
        launch = Launch(job, place / "run", place / "tmp", options)
        until = time.monotonic() + _LAUNCH_S
        try:
            with Sampler(launch.mark) as sampler:
                while queue and launch.code is None:
                    action = queue.pop(0)
                    text = actions.perform(action, launch, self.disk)
                    if not text and launch.code is not None:
                        queue.insert(0, action)  # too late: it is for the next launch
                    if text and done is not None:
                        done.append(text)
                        print(f"    {text}", flush=True)
                if not watch.wait_until(
                    lambda: launch.observe() is not None, until - time.monotonic(), 0.05
                ):
                    raise Broken(
                        f"no end within {_LAUNCH_S:g} s: {watch.find(launch.mark)}\n{launch.said}"
                    )
                if not watch.wait_until(lambda: not watch.find(launch.mark), 30.0):
                    raise Broken(f"processes outlive the launcher: {watch.find(launch.mark)}")
        finally:
            launch.kill()
        return launch, sampler.peaks


def _lost_workers(folder: Path) -> bool:
    return bool(json.loads((folder / "summary.json").read_text()).get("lost"))


def _peaks(peaks: dict[str, Peak]) -> str:
    return ", ".join(
        f"{role} {peak.resident_nbytes >> 20} MiB {peak.num_descriptors} fds"
        for role, peak in sorted(peaks.items())
        if role != watch.REMOVER
    )


def _what(text: str) -> str:
    """An action without its figures: SIGKILL worker, garbage to each server."""
    words = text.partition(":")[0].split()
    return " ".join(words[:4] if "to each" in text else words[:2])


def report(soak: Soak, seconds: float) -> str:
    """What was done, as a table."""
    lines = ["", "round job   seconds launches codes             actions (done of planned)"]
    for one in soak.rounds:
        codes = ",".join(map(str, one.codes))
        lines.append(
            f"{one.number:5} {one.job.name:5} {one.seconds:7.1f} {one.num_launches:8} {codes:17} "
            f"{len(one.done)} of {one.planned}; {one.outcome.splitlines()[0]}"
        )
        lines += [f"      {text}" for text in one.done]
    counts = Counter(_what(text) for one in soak.rounds for text in one.done)
    lines += ["", "actions: " + ", ".join(f"{text} {num}" for text, num in sorted(counts.items()))]
    total: dict[str, Peak] = {}
    for one in soak.rounds:
        for role, peak in one.peaks.items():
            total[role] = Peak(*map(max, zip(total.get(role, Peak()), peak)))
    good = [one for one in soak.rounds if one.outcome == "ok"]
    lines += [
        f"most of any process: {_peaks(total)}",
        f"runs that ended in the bits of an undisturbed one: "
        f"{sum(one.job.is_synchronous for one in good)}",
        f"updates on disk when a job ended, all counted once in the next: "
        f"{sum(one.num_updates for one in soak.rounds)}",
        f"full disks: {soak.disk.how}; runs that lost their checkpoints by them: "
        f"{sum(one.num_lost for one in soak.rounds)}",
        f"seed {soak.seed}: {len(good)} of {len(soak.rounds)} rounds ok, "
        f"{sum(one.num_launches for one in soak.rounds)} launches, "
        f"{sum(counts.values())} actions in {seconds:.0f} s",
    ]
    return "\n".join(lines)


def keep(place: Path) -> Path:
    """Copies what a failed round has left: its folder may be on a disk that is unmounted."""
    kept = Path(tempfile.mkdtemp(prefix="soak-failed-"))
    shutil.copytree(place, kept, symlinks=True, dirs_exist_ok=True)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="no round begins after that")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--round", type=int, help="only this one")
    parser.add_argument("--job", default="", choices=["", *(job.name for job in JOBS)])
    given = parser.parse_args()
    if sys.platform != "linux":
        sys.exit("the soak looks into /proc: it runs on Linux")
    os.environ["GRADWIRE_CACHE"] = ""
    began_s = time.monotonic()
    place = Path(tempfile.mkdtemp(prefix="soak-"))
    kept = None
    try:
        soak = Soak(given.seed, place)
        try:
            _run(soak, given, began_s)
            if soak.rounds[-1].outcome != "ok":
                kept = keep(place)
        finally:
            soak.disk.close()
    finally:
        shutil.rmtree(place, ignore_errors=True)
    print(report(soak, time.monotonic() - began_s), flush=True)
    last = soak.rounds[-1]
    if last.outcome != "ok":
        again = f"--seed {given.seed} --round {last.number} --job {last.job.name}"
        print(f"round {last.number} failed; again: {again}")
        print(f"its files: {kept}")
        print(last.outcome)
        sys.exit(1)


def _run(soak: Soak, given: argparse.Namespace, began_s: float) -> None:
    print(f"seed {given.seed}, full disks: {soak.disk.how}", flush=True)
    number = given.round or 0
    while True:
        print(f"round {number}", flush=True)
        one = soak.round(number, given.job)
        print(f"  {one.job.name}: {one.outcome} ({one.seconds:.0f} s)", flush=True)
        number += 1
        is_over = given.round is not None or time.monotonic() - began_s > given.seconds
        if is_over or one.outcome != "ok":
            return
