"""Decides whether a run on real processes may begin, and opens its record.

Every node reports its configuration and what its folder holds. The coordinator, the node that keeps
the record, compares the reports and opens the record, or reports why the run cannot begin.
"""

from collections.abc import Callable
from dataclasses import replace

from gradwire.experiment.processes.differences import differences, summarize_differences
from gradwire.experiment.processes.node.coordinator import Reports
from gradwire.experiment.processes.node.types import RunFolder
from gradwire.experiment.run.config import common_settings
from gradwire.experiment.run.record import Record, Row
from gradwire.experiment.run.setup import Experiment

_THIS_RUN, _ANOTHER_RUN = "this run", "another run"


def folder_content(where: RunFolder, experiment: Experiment) -> str:
    """What is in the folder on this machine; empty if there is nothing."""
    if where.folder is None:
        return ""
    record = Record(where.folder)
    if not record.exists:
        return _ANOTHER_RUN if record.remains else ""
    found, own = record.config.to_toml(), experiment.config.to_toml()
    return _THIS_RUN if common_settings(found) == common_settings(own) else _ANOTHER_RUN


class Admission:
    """The coordinator's decision. After it, `record` and `continues` are set.

    `measures`: the schedule must be measured first; then all nodes report again.
    """

    def __init__(
        self,
        experiment: Experiment | None,
        where: RunFolder,
        rank: int,
        name: Callable[[int], str],
        measures: bool = False,
    ) -> None:
        self.record: Record | None = None
        self.continues = False  # whether the run had begun before
        self._experiment = experiment
        self._where = where
        self._rank = rank
        self._name = name
        self._measures = measures

    def decide(self, reports: Reports) -> Row:
        failure = self._failed_node(reports) or self._different_settings(reports)
        if failure is not None:
            return failure
        if self._measures:
            return {"failure": "", "measures": True, "recorded": self._recorded_schedule()}
        folder, own = self._where.folder, reports[self._rank]
        assert own is not None
        self.continues = self._where.resumes or (
            self._where.is_restart and own["holds"] == _THIS_RUN
        )
        try:
            text = self._occupied_folder(reports) or self._open_record()
        except (ValueError, OSError) as error:
            text = str(error)
        if text:
            return {"failure": text}
        return {"failure": "", "folder": None if folder is None else str(folder)}

    def _recorded_schedule(self) -> str:
        """The schedule of this run, if it was started before; else ""."""
        folder = self._where.folder
        if folder is None or not self._where.is_restart or not Record(folder).exists:
            return ""
        assert self._experiment is not None
        recorded = Record(folder).config
        own = replace(self._experiment.config, scheduling=recorded.scheduling)
        is_same = common_settings(own.to_toml()) == common_settings(recorded.to_toml())
        return recorded.scheduling if is_same else ""

    def _failed_node(self, reports: Reports) -> Row | None:
        for rank, report in enumerate(reports):
            if report is None:
                text = f"{self._name(rank)} was lost before the run began"
                return {"failure": text, "lost": rank}
            if report["failure"]:
                return {"failure": report["failure"]}
        return None

    def _different_settings(self, reports: Reports) -> Row | None:
        configs = [report["config"] for report in reports if report is not None]
        if differs := differences(configs, self._rank, self._name):
            return {"failure": summarize_differences(differs), "differs": differs}
        return None

    def _occupied_folder(self, reports: Reports) -> str:
        folder, own = self._where.folder, reports[self._rank]
        assert own is not None
        assert self._experiment is not None
        is_finished = self.continues and folder is not None and Record(folder).is_finished
        if is_finished and not self._experiment.plan.pauses:
            return f"{folder} holds a run that is finished; begin a new one"
        for rank, report in enumerate(reports):
            holds = report["holds"] if report is not None else ""
            # `Record.create` refuses what is in the coordinator's own folder.
            is_elsewhere = rank != self._rank and (self.continues or not own["holds"])
            if is_elsewhere and holds and not (self.continues and holds == _THIS_RUN):
                return f"{folder} already holds another run where {self._name(rank)} is"
        return ""

    def _open_record(self) -> str:
        folder = self._where.folder
        if folder is not None:
            assert self._experiment is not None
            if self.continues:
                self.record = Record.open(folder)
            else:
                self.record = Record.create(folder, self._experiment.config)
            self.record.reopen()
        return ""
