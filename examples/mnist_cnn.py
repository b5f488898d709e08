"""A CNN on handwritten digits, under plain DDP and with compressed gradients, side by side.

    torchrun --nproc-per-node 2 examples/mnist_cnn.py
    GRADWIRE_DATA=/data torchrun --nproc-per-node 2 examples/mnist_cnn.py --compression "ef(sign)"

MNIST if it lies in $GRADWIRE_DATA/mnist (or with `--data mnist`, which downloads it), else the
digits of 8 x 8 pixels that come with gradwire. Both runs begin with the same weights and see the
same batches. Between processes of one machine sending costs next to nothing, so step times show
what compression costs; the last column shows how long the bytes take on a slow network.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from digits import accuracy, loaders
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

has_mnist = (Path(os.environ.get("GRADWIRE_DATA", "/nowhere")) / "mnist").is_dir()
parser = argparse.ArgumentParser()
parser.add_argument("--compression", default="ef(topk(0.01) >> fp16)")
parser.add_argument("--data", default="mnist" if has_mnist else "digits")
parser.add_argument("--steps", type=int, default=500)
args = parser.parse_args()


def make_model() -> nn.Module:
    torch.manual_seed(0)  # the same on all ranks
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(4),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def run(compression: str | None) -> tuple:
    """Test accuracy, seconds per step, and what gradwire counted; None: plain DDP."""
    model = DistributedDataParallel(make_model())
    hook = None
    if compression is not None:
        hook = gradwire.ddp_comm_hook(compression)
        model.register_comm_hook(*hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    began, step, epoch = time.perf_counter(), 0, 0
    while step < args.steps:
        train.sampler.set_epoch(epoch)
        for inputs, targets in train:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            step += 1
            if step == args.steps:
                break
        epoch += 1
    seconds = (time.perf_counter() - began) / args.steps
    return accuracy(model, test), seconds, hook[0].stats() if hook else None


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
train, test = loaders(32, rank, size, args.data)

plain, compressed = run(None), run(args.compression)
if rank == 0:
    stats = compressed[2]
    print(f"{args.data}, {size} ranks, {args.steps} steps")
    print(
        f"{'':26}{'accuracy':>9}{'ms a step':>11}{'kB a step':>11}{'ms to send at 100 Mbit/s':>26}"
    )
    rows = ("plain DDP", plain, stats.dense_bytes), (args.compression, compressed, stats.bytes_sent)
    for name, (right, seconds, _), sent in rows:
        nbytes = sent / stats.steps
        times = f"{1e3 * seconds:11.1f}{nbytes / 1e3:11.1f}{1e3 * nbytes / 12.5e6:26.1f}"
        print(f"{name:26}{right:9.1%}{times}")
    print(stats)
dist.destroy_process_group()
