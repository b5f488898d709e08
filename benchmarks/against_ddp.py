"""Is a step slower than one of DDP in float32 by more than encoding and decoding take?

Two ranks are processes of one thread on one machine, gloo on the loopback without a limit; an mlp
of 4.2 million parameters on digits, batch 32, sgd. `DistributedDataParallel` with its own buckets,
against bsp on allreduce through the engine for real processes, with native collectives. A step of
each in turns, in one run: the best times of the slower rank, and the ratio of the medians. fp16 is
to be compared with DDP and torch's own fp16 hook.

`more` is how much longer our step takes; `coding` is what encoding, decoding and averaging of what
was decoded take of it. The bound is kept where `more` is at most `coding`.

Answer, on 16 cores at rest (Intel Xeon, torch 2.11), best times, DDP 33.3 ms. More than DDP, and in
calls besides gradient, averages and update: ef(topk(0.01)) 11.5 ms, 22.9; ef(sign) 2.4 less, 9.8;
ef(qsgd(4)) 17.2, 28.5; powersgd(2) 3.9, 13.3; fp16 12.6, 9.3; identity 13.5, 11.7. So the
bound is kept by all but fp16 and identity, which miss it by 3.3 and 1.8 ms. Of what these two spent
in calls most was the checksum of a payload that is never sent as such, and fresh memory: since then
it is not computed, and memory is used again. That took identity's encoding from 10.5 to 1.4 ms and
fp16's from 9.6 to 1.5, on 2 cores beside other work; the steps were not measured again on 16. On 2
cores at rest (AMD EPYC, torch 2.13, three runs, DDP 38 to 45 ms) identity takes 5.1 to 8.0 ms more
and 1.8 to 2.0 in calls, fp16 6.1 to 13.5 and 3.3 to 3.5; top-k, sign and qsgd keep the bound in all
runs, powersgd (15.6 to 29.5, 27.0 to 28.9) in two of three. DDP sends while it computes, which the
schedule here does not.
"""

import argparse
import copy
import time
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from gradwire import data
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.registries import MODELS
from gradwire.experiment.run.setup import prepare
from gradwire.runtime.process.engine import ProcessEngine
from gradwire.runtime.process.gloo import GlooTransport
from gradwire.training import program
from ranks import on_ranks

MODEL = "mlp((2010, 2010))"
DDPS = ("ddp", "ddp fp16 hook")
COMPRESSIONS = ("identity", "fp16", "ef(topk(0.01))", "ef(sign)", "ef(qsgd(4))", "powersgd(2)")
# Of what programs call: neither encoding nor decoding.
NOT_CODING = ("clipped_update", "mean_in_order", "concatenate")


def measure(
    rank: int, num_steps: int, native: bool, scheduling: str
) -> dict[str, list[list[float]]]:
    """Seconds by name: of each step, and of the coding in it."""
    dataset = data.load("digits")
    module = MODELS.parse(MODEL).build(dataset.input_shape, dataset.num_classes)
    ddps = {name: DistributedDataParallel(copy.deepcopy(module)) for name in DDPS}
    ddps["ddp fp16 hook"].register_comm_hook(None, default_hooks.fp16_compress_hook)
    rules = {name: torch.optim.SGD(ddp.parameters(), lr=0.01) for name, ddp in ddps.items()}
    plans = {
        name: prepare(
            Config(
                model=MODEL,
                workers=dist.get_world_size(),
                compression=name,
                scheduling=scheduling,
                engine="process",
                threads=1,
            )
        ).plan
        for name in COMPRESSIONS
    }
    replicas = {name: plan.initial_replicas()[rank] for name, plan in plans.items()}
    batch = plans["identity"].batch
    transport = GlooTransport()
    steps: dict[str, list[float]] = {name: [] for name in (*DDPS, *COMPRESSIONS)}
    coding: dict[str, list[float]] = {name: [] for name in COMPRESSIONS}
    job = 0
    for step in range(num_steps):
        for name, ddp in ddps.items():
            dist.barrier()
            began = time.perf_counter()
            inputs, targets = batch(rank, step)
            rules[name].zero_grad()
            nn.functional.cross_entropy(ddp(inputs), targets).backward()
            rules[name].step()
            steps[name].append(time.perf_counter() - began)
        for name, plan in plans.items():
            job += 1
            engine = ProcessEngine(
                transport,
                evaluate=plan.task.gradients,
                evaluate_layers=plan.task.gradient_by_layer,
                job=job,
                native=native,
            )
            dist.barrier()
            began = time.perf_counter()
            result = engine.run(partial(_step, plan, replicas[name], step))
            steps[name].append(time.perf_counter() - began)
            assert result is not None
            replicas[name] = result
            calls = engine.call_s.items()
            coding[name].append(sum(s for what, s in calls if what not in NOT_CODING))
    transport.close()
    return {name: [steps[name], coding.get(name, [0.0] * num_steps)] for name in steps}


def _step(plan, replica, step, node):
    return program.train(plan, node, replica, step, step + 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=23)
    parser.add_argument("--point-to-point", action="store_true", help="no native collectives")
    parser.add_argument("--scheduling", default="wfbp")
    args = parser.parse_args()
    results = on_ranks(args.ranks, measure, args.steps, not args.point_to_point, args.scheduling)
    # [name] -> [steps], of the slower rank; the first ones were to warm up.
    slowest = {
        name: torch.tensor([result[name] for result in results]).amax(0)[:, 3:] * 1e3
        for name in results[0]
    }
    base = slowest["ddp"][0]
    print(f"{'':16} {'step ms':>8} {'of ddp':>7} {'more ms':>8} {'coding ms':>10} {'median':>7}")
    for name, (step, coding) in slowest.items():
        best, ratio = step.min(), step.median() / base.median()
        print(
            f"{name:16} {best:8.1f} {best / base.min():7.2f} {best - base.min():8.1f} "
            f"{coding.min():10.1f} {ratio:7.2f}"
        )


if __name__ == "__main__":
    main()
