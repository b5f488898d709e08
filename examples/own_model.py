"""Your own model in the simulator: which compression would pay for it, and on which network?

    python examples/own_model.py

trains a small CNN on images of shapes with four virtual workers, several times: without
compression, in fp16, and compressed. The bytes are those that real workers would send; the time is
virtual, for two bandwidths. Takes about half a minute on two cores.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradwire

METHODS = ("identity", "fp16", "ef(topk(0.02) >> fp16)", "ef(powersgd(2))")


class ShapeNet(nn.Module):
    """A module as you have it: gradwire needs no changes in it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.hidden = nn.Linear(16 * 16, 128)
        self.head = nn.Linear(128, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(images))), 2)
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        return self.head(F.relu(self.hidden(x.flatten(1))))


def make_images(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy images [count, 1, 16, 16] of squares, crosses and discs, and which it is."""
    labels = torch.randint(0, 3, (count,), generator=generator)
    centres = torch.randint(4, 12, (count, 2, 1, 1), generator=generator)
    rows, columns = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    down, right = (rows - centres[:, 0]).abs(), (columns - centres[:, 1]).abs()
    shapes = torch.stack(
        [
            torch.maximum(down, right) <= 3,
            (torch.minimum(down, right) == 0) & (torch.maximum(down, right) <= 3),
            down.square() + right.square() <= 10,
        ],
        dim=1,
    )  # [count, 3, 16, 16]
    images = shapes[torch.arange(count), labels].float()[:, None]
    return images + 0.5 * torch.randn(images.shape, generator=generator), labels


def make_data() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return make_images(2048, generator), make_images(512, generator)


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulate compressed training of an own model.")
    parser.add_argument("--epochs", type=float, default=5.0)
    epochs = parser.parse_args().epochs
    torch.set_num_threads(1)

    data = make_data()
    columns = "compression", "accuracy", "bytes per step", "100 Mbit/s", "1 Gbit/s"
    print("{:24} {:>8} {:>14} {:>11} {:>9}".format(*columns))
    runs = {}
    for compression in METHODS:
        run = runs[compression] = gradwire.simulate(
            model=ShapeNet,  # called once per run, with the seed of the run; a module goes as well
            data=data,
            workers=4,
            batch_size=16,
            epochs=epochs,
            optimizer="sgd(0.05, momentum=0.9)",
            compression=compression,
            bandwidth="100Mbit",
            what_if=("1Gbit",),
            compute="fixed(0.005)",  # without it the time of a gradient is measured here
        )
        times = run.virtual_time_s, run.summary["virtual_times_s"]["1Gbit"]
        sent = run.summary["bytes_per_worker_step"]
        print(
            f"{compression:24} {100 * run.accuracy:7.1f}% {sent:14,.0f} {times[0]:9.2f} s "
            f"{times[1]:7.2f} s"
        )

    # The result is an ordinary model.
    model = ShapeNet()
    model.load_state_dict(runs["fp16"].state_dict())
    model.eval()
    images, labels = data[1]
    with torch.no_grad():
        right = (model(images).argmax(dim=1) == labels).double().mean()
    print(f"The model trained with fp16, loaded into a ShapeNet: {100 * right:.1f}%")


if __name__ == "__main__":
    main()
