"""A CNN under DistributedDataParallel, with compressed gradients.

torchrun --nproc-per-node 2 examples/ddp.py
torchrun --nproc-per-node 2 examples/ddp.py --compression "powersgd(2)"
"""

import argparse

import torch
import torch.distributed as dist
from digits import accuracy, loaders, make_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

parser = argparse.ArgumentParser()
parser.add_argument("--compression", default="ef(topk(0.01) >> fp16)")
parser.add_argument("--epochs", type=int, default=8)
args = parser.parse_args()

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
train, test = loaders(32, rank, size)

model = DistributedDataParallel(make_model())
state, hook = gradwire.ddp_comm_hook(args.compression)
model.register_comm_hook(state, hook)  # the one line

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(args.epochs):
    train.sampler.set_epoch(epoch)
    for inputs, targets in train:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

if rank == 0:
    print(f"test accuracy {accuracy(model, test):.1%}")
    print(state.stats())
dist.destroy_process_group()
