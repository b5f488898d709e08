"""A user's script for torchrun: `gradwire.run` with a module and data of its own."""

import sys

import torch
import torch.distributed as dist
from torch import nn

import gradwire


class Net(nn.Module):
    """Draws from torch's generator, changes a buffer, and chooses its way by a value."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += len(x)
        h = self.norm(self.first(x))
        h = nn.functional.dropout(h, 0.2, self.training)
        return self.last(h if h.sum().item() > 0 else -h)


def make_data():
    x = torch.randn(128, 4, generator=torch.Generator().manual_seed(7))
    y = x[:, :3].argmax(dim=1)
    return (x[:96], y[:96]), (x[96:], y[96:])


SETTINGS = {"workers": 2, "batch_size": 8, "steps": 6, "eval_every": 3, "scheduling": "priority"}


def main(folder: str, is_seeded: bool) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(3 if is_seeded else dist.get_rank())
    module = Net()
    torch.manual_seed(dist.get_rank())  # what else the script draws does not matter
    try:
        run = gradwire.run(model=module, data=make_data(), out=f"{folder}/run", **SETTINGS)
        torch.save((run.params, dict(run.buffers)), f"{folder}/rank{dist.get_rank()}.pt")
    except ValueError as error:
        with open(f"{folder}/error{dist.get_rank()}", "w") as file:
            file.write(str(error))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "seeded")
