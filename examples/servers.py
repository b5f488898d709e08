"""Parameter servers in a plain loop: a CNN, two workers with batches of 64, SGD with momentum.

gradwire launch --workers 2 --servers 2 -- python examples/servers.py
gradwire launch --workers 2 --servers 2 -- python examples/servers.py --synchronization "ssp(3)"
"""

import argparse
import os

import torch
from digits import accuracy, loaders, make_model
from torch import nn

import gradwire

parser = argparse.ArgumentParser()
parser.add_argument("--compression", default="ef(sign)")
parser.add_argument("--synchronization", default="bsp", help="bsp, ssp(3) or asp")
parser.add_argument("--epochs", type=int, default=30)
args = parser.parse_args()

gradwire.init()
train, test = loaders(64, gradwire.rank(), gradwire.size())
model = make_model()
gradwire.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = gradwire.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5),
    named_parameters=model.named_parameters(),
    compression=args.compression,
    architecture=f"parameter_server({os.environ.get('DMLC_NUM_SERVER', 1)})",
    synchronization=args.synchronization,
)

for epoch in range(args.epochs):
    train.sampler.set_epoch(epoch)
    for inputs, targets in train:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()  # bsp: gradients go to the servers while it runs
        optimizer.step()  # ssp and asp: what the step changed goes there, the model comes back
    if gradwire.rank() == 0 and epoch % 5 == 4:
        print(f"epoch {epoch}: loss {float(loss.detach()):.3f}, {accuracy(model, test):.1%} right")

if gradwire.rank() == 0:
    print(optimizer.stats())
gradwire.shutdown()
