"""A script as users of BytePS have it, with another import: digits on every rank of torchrun."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import gradwire as bps
from gradwire import data

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--fp16-pushpull", action="store_true")
args = parser.parse_args()

bps.init()
torch.manual_seed(42 + bps.rank())  # other weights on every rank, until they are broadcast
torch.set_num_threads(1)

digits = data.load("digits")
cpu = torch.device("cpu")
every = torch.arange(digits.num_train)
train = TensorDataset(digits.inputs(every, cpu), digits.targets(every, cpu))
every = torch.arange(digits.num_test)
inputs, targets = digits.inputs(every, cpu, "test"), digits.targets(every, cpu, "test")
sampler = DistributedSampler(train, num_replicas=bps.size(), rank=bps.rank())
loader = DataLoader(train, batch_size=16, sampler=sampler)
mine = slice(bps.rank(), None, bps.size())  # of the test set

model = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * bps.size(), momentum=0.5)
compression = bps.Compression.fp16 if args.fp16_pushpull else bps.Compression.none
optimizer = bps.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=compression
)
bps.broadcast_parameters(model.state_dict(), root_rank=0)
bps.broadcast_optimizer_state(optimizer, root_rank=0)

for name in ("accuracy", "loss", "count"):
    bps.declare(name)
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for own_inputs, own_targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(own_inputs), own_targets)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        right = (model(inputs[mine]).argmax(1) == targets[mine]).float()
    accuracy = bps.push_pull(right.mean(), name="accuracy").item()
    handle = bps.byteps_push_pull(loss.detach(), name="loss")
    total = bps.push_pull_inplace(torch.tensor(len(right)), average=False, name="count")
    mean_loss = bps.synchronize(handle).item()
    if bps.rank() == 0:
        print(f"epoch {epoch}: {total.item()} images, loss {mean_loss:.2f}")
        print(f"epoch {epoch}: accuracy {100 * accuracy:.1f}%")
bps.shutdown()
