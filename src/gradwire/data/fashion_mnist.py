"""Fashion-MNIST: 70,000 photographs of clothes, grey, 28 x 28, in MNIST's format and sizes but
harder (Xiao, Rasul and Vollgraf 2017; MIT licence).
"""

from gradwire.data import idx
from gradwire.data.dataset import Dataset

SOURCE = idx.IdxSource(
    name="fashion_mnist",
    # served without encryption: the SHA-256 is what vouches for the files
    url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    sizes_bytes=(26_421_880, 29_515, 4_422_102, 5_148),
    sha256s=(
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ),
    other_folders=("fashion-mnist", "FashionMNIST/raw"),
    train_counts=(6000,) * 10,
    test_counts=(1000,) * 10,
    mean=72.94035223,  # 0.2860 of 255
    std=90.02118235,  # 0.3530 of 255
)


def load() -> Dataset:
    return idx.assemble(SOURCE)
