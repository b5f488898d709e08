"""What nodes do between two segments: they agree on what comes next, and evaluate the model."""

import torch
from torch import Tensor

from gradwire.experiment.processes.node.coordinator import Reports
from gradwire.experiment.processes.node.durable import DurableNode
from gradwire.experiment.run.record import Row
from gradwire.experiment.run.roles import WorkerRole


class EvaluatingNode(DurableNode):
    """One node between segments. The coordinator decides and evaluates, the others report."""

    # Notices of all nodes, which the coordinator shows to the user.

    def _take_notices(self) -> Row:
        notices, self.notices = self.notices, []
        return {"notices": notices}

    def _show_notices(self, reports: Reports) -> Row:
        for rank, report in enumerate(reports):
            for text in [] if report is None else report["notices"]:
                self._notify(f"{self._name(rank)}: {text}")
        return {}

    # Agreements and evaluations.

    def _agree(self) -> Row:
        """What comes next, as the coordinator decides it."""
        is_last = self.step == self.plan.num_steps
        report = {
            "signal": self.signals.wanted,
            "bytes_sent": self.engine.ledger.total_bytes,
            "training_s": self.spent["training_s"],
            "segment_steps": self.segment_steps,
            "step_s": self.step_s,
            **self._take_notices(),
            **self.role.report(digests=is_last or self.step % self.config.eval_every == 0),
        }
        if not self.plan.pauses:
            report |= self._ledgers()

        def decide(reports: Reports) -> Row:
            assert self._coordinator is not None
            self._show_notices(reports)
            return self._coordinator.decide(self.step, reports)

        return self.agreement.agree(report, decide)

    def _evaluate(self, decision: Row) -> None:
        """The coordinator collects the model and evaluates it."""
        model = self._collect_model(decision)
        params: dict[int, list[Tensor]] = {}
        if decision["differ"]:
            own = [self.role.replica.params] if isinstance(self.role, WorkerRole) else []
            count = 1
            if self.plan.mixes:
                own += self.role.model()
                count = 2 + len(self.plan.task.initial_buffers())
            params = self.agreement.collect(own, self.layout.workers, count)
        if self._coordinator is not None:
            workers = [params[rank] for rank in sorted(params)]
            self._coordinator.evaluate(self.step, decision, model, workers)

    def _collect_model(self, decision: Row) -> list[Tensor]:
        """On the coordinator: the model, parameters and then statistics; elsewhere nothing."""
        ranks, source, own = decision["holders"], decision["statistics_rank"], self.role.model()
        initial = list(self.plan.task.initial_buffers().values())
        if self.layout.is_worker(ranks[0]):
            return self.agreement.collect(own, ranks, 1 + len(initial)).get(ranks[0], [])
        shards = self.agreement.collect(own[:1], ranks, 1)
        statistics: dict[int, list[Tensor]] = {}
        if initial:
            statistics = self.agreement.collect(own[1:], [source], len(initial))
        if not self.is_coordinator:
            return []
        params = torch.cat([shards[rank][0] for rank in ranks])
        return [params, *statistics.get(source, initial)]

    def _evaluate_snapshots(self, steps: list[str], reports: Reports) -> None:
        """The coordinator evaluates the model snapshots of rank 0, one after the other."""
        count = 1 + len(self.plan.task.initial_buffers())
        # The clock of rank 0 began when it joined, and its earlier snapshots are lost with it.
        joined_s = max([row.get("back_s", 0.0) for row in self.lost if row["rank"] == 0] or [0.0])
        for step in steps:
            own = [] if self.model_snapshots is None else self.model_snapshots.load(int(step))
            model = self.agreement.collect(own, [0], count).get(0)
            if self._coordinator is not None and model:
                self._coordinator.evaluate_snapshot(step, model, reports, joined_s)

    def _ledgers(self) -> Row:
        ledger, received = self.engine.ledger, self.engine.received
        return {"ledger": ledger.snapshot(), "received": received.snapshot()}
