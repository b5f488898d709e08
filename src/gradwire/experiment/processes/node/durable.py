"""A server whose process may be restarted in a segment, and one that leaves its state behind."""

from typing import Any

from gradwire.experiment.processes.node.state import NodeState
from gradwire.experiment.processes.state.recovery import SERVER_STATE_STEP, store_entry
from gradwire.experiment.run.roles import ServerRole, make_role


class DurableNode(NodeState):
    """A node that can continue in the middle of a segment."""

    def state(self) -> dict[str, Any] | None:
        """The whole state of this node in a segment, if its program waits; else None."""
        if not self.is_in_segment or not self.engine.is_at_rest:
            return None
        return {
            "role": self.role.snapshot(),
            "step": self.step,
            "last": self.last,
            "num_runs": self.engine.num_runs,
            "ledger": self.engine.ledger.snapshot(),
            "received": self.engine.received.snapshot(),
            "bytes_at_push": self.bytes_at_push,
            "call_s": dict(self.engine.call_s),
            "spent": {**self.spent, "sent_nbytes": self.sent_nbytes},
            "metrics": self.metrics,
            "folder": None if self.folder is None else str(self.folder),
            "saved_step": self.saved_step,
        }

    def _restore_in_segment(self, state: dict[str, Any]) -> None:
        """Continues from a state in a segment."""
        self._prepare(state["folder"])
        self.role = make_role(self.plan, self.rank)
        self.role.restore(state["role"], is_replayed=True)
        self.step, self.last, self.current_step = state["step"], state["last"], state["step"]
        self.saved_step = state["saved_step"]
        self.engine.num_runs = state["num_runs"] - 1  # it enters that run again
        self.engine.ledger.restore(state["ledger"])
        self.engine.received.restore(state["received"])
        self.bytes_at_push = state["bytes_at_push"]
        self.engine.call_s.update(state["call_s"])
        self.spent.update(state["spent"])
        self.metrics = state["metrics"]
        self.is_in_segment = True

    def _save_server_state(self) -> None:
        """Saves the state of a server when a run that does not pause ends early."""
        if self.checkpoints is not None and isinstance(self.role, ServerRole):
            self.role.server.forget_workers()
            num_handed = getattr(self.transport, "num_handed", 0)
            own = store_entry(self._store_folder, num_handed, resumed_from_servers=self._rejoins)
            self.checkpoints.write(SERVER_STATE_STEP, {**self._checkpoint_state(), **own})
