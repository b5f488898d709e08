"""MNIST: 70,000 handwritten digits, grey, 28 x 28 (LeCun, Bottou, Bengio and Haffner 1998)."""

from gradwire.data import idx
from gradwire.data.dataset import Dataset

SOURCE = idx.IdxSource(
    name="mnist",
    url="https://ossci-datasets.s3.amazonaws.com/mnist/",
    sizes_bytes=(9_912_422, 28_881, 1_648_877, 4_542),
    sha256s=(
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
    other_folders=("MNIST/raw",),
    train_counts=(5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949),
    test_counts=(980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009),
    mean=33.31842145,  # 0.1307 of 255
    std=78.56748998,  # 0.3081 of 255
)


def load() -> Dataset:
    return idx.assemble(SOURCE)
