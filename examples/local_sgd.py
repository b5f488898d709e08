"""A CNN trained by ranks that communicate rarely: local SGD, DiLoCo, or gossip.

torchrun --nproc-per-node 2 examples/local_sgd.py
torchrun --nproc-per-node 2 examples/local_sgd.py --period 16 --compression "ef(topk(0.05))"
torchrun --nproc-per-node 2 examples/local_sgd.py --method diloco
torchrun --nproc-per-node 2 examples/local_sgd.py --method decentralized
"""

import argparse

import torch
import torch.distributed as dist
from digits import accuracy, loaders, make_model
from torch import nn

import gradwire

parser = argparse.ArgumentParser()
METHODS = ("local_sgd", "diloco", "decentralized")
parser.add_argument("--method", default="local_sgd", choices=METHODS)
parser.add_argument("--period", type=int, default=8)
parser.add_argument("--compression", default="identity")
parser.add_argument("--epochs", type=int, default=8)
args = parser.parse_args()

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
train, test = loaders(32, rank, size)

model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
method = getattr(gradwire, args.method)
with method(model, optimizer, period=args.period, compression=args.compression) as averaging:
    for epoch in range(args.epochs):
        train.sampler.set_epoch(epoch)
        for inputs, targets in train:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

if rank == 0:  # all ranks have the same model now
    print(f"test accuracy {accuracy(model, test):.1%}")
    print(averaging.stats())
dist.destroy_process_group()
