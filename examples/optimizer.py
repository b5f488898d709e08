"""A plain loop with gradwire.DistributedOptimizer, in the convention of Horovod.

torchrun --nproc-per-node 2 examples/optimizer.py
torchrun --nproc-per-node 2 examples/optimizer.py --compression "ef(sign)" --scheduling wfbp
"""

import argparse

import torch
from digits import accuracy, loaders, make_model
from torch import nn

import gradwire

parser = argparse.ArgumentParser()
parser.add_argument("--compression", default="ef(sign)")
parser.add_argument("--scheduling", default="fusion")
parser.add_argument("--epochs", type=int, default=8)
args = parser.parse_args()

gradwire.init()
train, test = loaders(32, gradwire.rank(), gradwire.size())
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
gradwire.broadcast_parameters(model.state_dict(), root_rank=0)
gradwire.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = gradwire.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=args.compression,
    scheduling=args.scheduling,
)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)

for epoch in range(args.epochs):
    train.sampler.set_epoch(epoch)
    for inputs, targets in train:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()  # gradients leave while it runs, and are averaged when it returns
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
    scheduler.step()
    loss = gradwire.allreduce(loss.detach())
    if gradwire.rank() == 0:
        print(f"epoch {epoch}: loss {float(loss):.3f}, accuracy {accuracy(model, test):.1%}")

if gradwire.rank() == 0:
    print(optimizer.stats())
gradwire.shutdown()
