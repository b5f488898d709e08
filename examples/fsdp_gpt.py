"""A small GPT that FSDP2 shards inside a node, with compression between nodes.

    torchrun --nproc-per-node 4 examples/fsdp_gpt.py

Four processes play two nodes of two ranks: on GPUs if there is one for each process, else on the
CPU. On real nodes the inner dimension of the mesh is the number of GPUs in a node.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire

TEXT = "the quick brown fox jumps over the lazy dog. " * 40
STEPS, BATCH, LENGTH, WIDTH = 60, 8, 32, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        y = self.first(x)
        x = x + self.attention(y, y, y, attn_mask=later, need_weights=False)[0]
        return x + self.mlp(self.second(x))


class GPT(nn.Module):
    def __init__(self, num_characters: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(num_characters, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(WIDTH, num_characters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.characters(x) + self.positions
        for block in self.blocks:
            y = block(y)
        return self.out(y).clone()  # not a view: FSDP2 hooks into what the model returns


on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()
if size % 2:
    raise SystemExit(f"nodes have two ranks here, got {size}: torchrun --nproc-per-node 4 ...")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
torch.manual_seed(0)

alphabet = sorted(set(TEXT))
text = torch.tensor([alphabet.index(character) for character in TEXT])
mesh = init_device_mesh(device.type, (size // 2, 2), mesh_dim_names=("replicate", "shard"))
model = GPT(len(alphabet)).to(device)
for block in model.blocks:
    fully_shard(block, mesh=mesh["shard"])
fully_shard(model, mesh=mesh["shard"])
replicas = gradwire.compress_replicas(
    model, mesh["replicate"].get_group(), compression="ef(topk(0.05) >> fp16)"
)

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
draws = torch.Generator().manual_seed(rank)
for step in range(STEPS):
    starts = torch.randint(len(text) - LENGTH - 1, (BATCH, 1), generator=draws)
    window = text[starts + torch.arange(LENGTH + 1)].to(device)
    optimizer.zero_grad()
    logits = model(window[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    if rank == 0 and (step + 1) % 20 == 0:
        print(f"step {step + 1}: loss {loss.item():.2f}")

if rank == 0:
    print(replicas.stats())
dist.destroy_process_group()
