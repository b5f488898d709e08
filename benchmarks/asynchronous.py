"""How much slower is an asynchronous simulation than a bulk-synchronous one?

In bsp all workers share one vector and their requests are due together; under asp each has a model
of its own and requests are due at random times. They are still evaluated together. 32 workers, mlp
on digits, batch 32, compute times lognormal(0.01, sigma=0.3), one server; one thread, no evaluation
of the model in between.
"""

import time

import torch

from gradwire.experiment.config import Config
from gradwire.experiment.runner import _Simulation, use_threads
from gradwire.experiment.setup import prepare

STEPS = 200


def gradients_per_second(synchronization: str, architecture: str) -> float:
    config = Config(
        workers=32,
        batch_size=32,
        steps=STEPS,
        optimizer="sgd(0.01)",
        synchronization=synchronization,
        architecture=architecture,
        compute="lognormal(0.01, sigma=0.3)",
        eval_every=STEPS,
        threads=1,
    )
    with use_threads(1):
        simulation = _Simulation(prepare(config), None)
        start = time.perf_counter()
        simulation.run(None)
        seconds = time.perf_counter() - start
    return config.workers * STEPS / seconds


def main() -> None:
    torch.set_num_threads(1)
    gradients_per_second("bsp", "allreduce")  # warm up
    rows = {
        (s, a): max(gradients_per_second(s, a) for _ in range(2))
        for s, a in (
            ("bsp", "allreduce"),
            ("bsp", "parameter_server"),
            ("asp", "parameter_server"),
        )
    }
    fastest = rows["bsp", "allreduce"]
    for (synchronization, architecture), rate in rows.items():
        print(
            f"{synchronization:12} {architecture:20} {rate:8.0f} gradients/s, "
            f"{rate / fastest:.2f} of bsp"
        )


if __name__ == "__main__":
    main()
