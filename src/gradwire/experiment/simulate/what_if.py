"""The same run on other networks: only clocks advance, by the trace of each segment."""

from gradwire.core.errors import WhatIfError
from gradwire.experiment.run.setup import Experiment
from gradwire.runtime.network.faults import Loss
from gradwire.runtime.virtual.engine import VirtualEngine
from gradwire.runtime.virtual.trace import Trace


class WhatIf:
    """The virtual time of a run at the bandwidths of `what_if`."""

    def __init__(self, experiment: Experiment) -> None:
        self._config = experiment.config
        self._num_others = experiment.plan.architecture.num_others
        self.engines = {
            name: VirtualEngine(
                network,
                self._config.workers,
                profile=experiment.plan.layer_profile,
                has_priorities=experiment.plan.scheduling.has_priorities,
                faults=[fault for fault in experiment.faults if isinstance(fault, Loss)],
                key=experiment.plan.key.child("faults"),
            )
            for name, network in experiment.what_if.items()
        }

    @property
    def times_s(self) -> dict[str, float]:
        return {name: engine.now for name, engine in self.engines.items()}

    def play(self, trace: Trace | None) -> None:
        """Advances all clocks by a segment."""
        for engine in self.engines.values():
            assert trace is not None
            if not trace.replayable:
                self.refuse()
            engine.run([trace.replay] * self._config.workers, [trace.replay] * self._num_others)

    def refuse(self) -> None:
        """Raises if there are other networks."""
        if self.engines:
            raise WhatIfError(
                f"what_if: what {self._config.synchronization} on {self._config.architecture} "
                "does depends on the network; run it once for each bandwidth"
            )
