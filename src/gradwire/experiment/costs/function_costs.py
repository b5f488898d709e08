"""The costs of functions besides the codecs in them: averages, updates, sums among neighbours.

They are measured in runs: some workers train networks of several sizes with every synchronization,
every architecture and every method that is no codec. The time of a call without its codecs is
stored by the number of their reports and by the bytes of the tensors that it reads and makes.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gradwire.compression import COMPRESSION
from gradwire.core.codec import Codec
from gradwire.core.metering import Work
from gradwire.core.node import Call
from gradwire.core.notation import notation_name
from gradwire.experiment.costs.coding_costs import Charge
from gradwire.experiment.costs.cost_fit import Samples, Times, usual
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.setup import prepare
from gradwire.experiment.simulate.simulation import simulate_prepared
from gradwire.experiment.studies.matrix import pairs
from gradwire.runtime.virtual.coding_time import CodingTime, Cost, call_name, touched_nbytes
from gradwire.synchronization import SYNCHRONIZATION

# Of the hidden layer of a network on the digits: 1,060, 52,510 and 2,097,160 parameters.
_WIDTHS = (14, 700, 27962)
_BASE = Config(
    workers=4,
    steps=5,
    eval_every=5,
    batch_size=1,
    threads=1,
    compute="fixed(0.001)",
    optimizer="sgd(0.01)",
    coding="free",
)
_OPTIMIZERS = ("sgd(0.01)", "sgd(0.01, momentum=0.9)", "adam")
_CODED = ("identity", "ef(topk(0.01))", "qsgd(bits=4)", "ef(sign)")


@dataclass
class _CallTimer(CodingTime):
    """Charges nothing, and stores the times of calls without their codecs."""

    others: Mapping[str, Cost]  # of what is reported without a codec
    functions: defaultdict[str, Times] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )

    meters = times_codecs = True
    clock = staticmethod(time.thread_time)

    def seconds(self, call: Call[Any], result: Any, work: Sequence[Work], taken_s: float) -> float:
        nbytes = touched_nbytes((call.function, call.args), result)
        if nbytes is not None:
            for one in work:
                if one.codec is None:
                    taken_s -= self.others[one.operation].seconds(0, one.nbytes)
                taken_s -= one.seconds
            self.functions[call_name(call)][len(work), nbytes].append(taken_s)
        return 0.0


def function_samples(
    others: Mapping[str, Cost], progress: Callable[[str, int, int], None]
) -> dict[str, Samples]:
    """The usual times of functions, by the reports in them and the bytes that they touch."""
    recorder = _CallTimer(others)
    runs = list(configs())
    for done, config in enumerate(runs):
        what = f"{config.synchronization} {config.architecture} {config.compression}"
        progress(what, done, len(runs))
        for width in _WIDTHS:
            experiment = prepare(replace(config, model=f"mlp(({width},))"))
            simulate_prepared(replace(experiment, charge=Charge(recorder, {})))
    return {name: usual(recorder.functions[name]) for name in sorted(recorder.functions)}


def configs() -> Iterator[Config]:
    """Runs in which every function of the library is called."""
    for optimizer in _OPTIMIZERS:
        yield replace(_BASE, optimizer=optimizer)
    for compression in _CODED:
        for architecture in ("allreduce", "ring", "parameter_server(2)"):
            yield replace(_BASE, compression=compression, architecture=architecture)
    seen = set[str]()
    for pair in pairs():
        new = {_name(pair.synchronization), pair.architecture} - seen
        if not pair.refusal and new:
            seen |= new
            yield replace(
                _BASE, synchronization=pair.synchronization, architecture=pair.architecture
            )
    for cls in sorted(COMPRESSION, key=notation_name):
        if not issubclass(cls, Codec):
            for text in cls.examples or (notation_name(cls),):
                yield replace(_BASE, compression=_fed_back(text))


def _name(synchronization: str) -> str:
    return notation_name(type(SYNCHRONIZATION.parse(synchronization)))


def _fed_back(text: str) -> str:
    """The method with error feedback, if it allows that: feedback has its own functions."""
    try:
        return repr(COMPRESSION.parse(f"ef({text})"))
    except ValueError:
        return text
