"""A script as users of Horovod have it, with another import: digits on every rank of torchrun."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import gradwire as hvd
from gradwire import data

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--base-lr", type=float, default=0.05)
parser.add_argument("--batches-per-allreduce", type=int, default=1)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--use-adasum", action="store_true")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
args = parser.parse_args()

hvd.init()
torch.manual_seed(42 + hvd.rank())  # other weights on every rank, until they are broadcast
torch.set_num_threads(1)
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank())

digits = data.load("digits")
cpu = torch.device("cpu")
splits = []
for split, count in (("train", digits.num_train), ("test", digits.num_test)):
    every = torch.arange(count)
    splits.append(
        TensorDataset(digits.inputs(every, cpu, split), digits.targets(every, cpu, split))
    )
samplers = [DistributedSampler(s, num_replicas=hvd.size(), rank=hvd.rank()) for s in splits]
batch_size = 16 * args.batches_per_allreduce
train_loader = DataLoader(splits[0], batch_size=batch_size, sampler=samplers[0])
test_loader = DataLoader(splits[1], batch_size=64, sampler=samplers[1])

model = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
scale = 1 if args.use_adasum else args.batches_per_allreduce * hvd.size()
if args.use_adasum and hvd.nccl_built():
    scale = hvd.local_size()
optimizer = torch.optim.SGD(model.parameters(), lr=args.base_lr * scale, momentum=0.5)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    backward_passes_per_step=args.batches_per_allreduce,
    op=hvd.Adasum if args.use_adasum else hvd.Average,
    gradient_predivide_factor=args.gradient_predivide_factor,
)
first_epoch = int(hvd.broadcast(torch.tensor(hvd.rank()), root_rank=0, name="first_epoch"))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)


def average(value: float, name: str) -> float:
    return hvd.allreduce(torch.tensor(value), name=name).item()


for epoch in range(first_epoch, args.epochs):
    model.train()
    samplers[0].set_epoch(epoch)
    for inputs, targets in train_loader:
        optimizer.zero_grad()
        for own_inputs, own_targets in zip(inputs.split(16), targets.split(16)):
            loss = F.cross_entropy(model(own_inputs), own_targets)
            (loss / -(-len(inputs) // 16)).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        with optimizer.skip_synchronize():
            optimizer.step()
    model.eval()
    right = 0.0
    with torch.no_grad():
        for inputs, targets in test_loader:
            right += (model(inputs).argmax(1) == targets).sum().item()
    accuracy = average(right / len(samplers[1]), "accuracy")
    if hvd.rank() == 0:
        print(f"epoch {epoch}: accuracy {100 * accuracy:.1f}%")

flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
everyone = hvd.allgather(flat[None], name="parameters")
if hvd.rank() == 0:
    print("replicas equal:", all(torch.equal(own, everyone[0]) for own in everyone))
hvd.shutdown()
