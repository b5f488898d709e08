"""Defaults of the measuring commands.

The command line's help shows these, so this file imports nothing that takes long to import.
"""

from gradwire.experiment.run.config import Config

CODECS_NUMEL = 1 << 22  # of the Gaussian and the Laplacian: 16 MiB, more than most caches

RD_LENGTHS = (256, 512, 1024, 2048, 8192, 32768)
RD_RATES = (0.1, 0.3, 0.5, 0.7, 0.9)

# A small network on the digits that come with the package, on a network slow enough to matter.
MATRIX_BASE = Config(
    workers=8,
    steps=20,
    batch_size=16,
    optimizer="sgd(0.2)",
    compute="lognormal(0.01, sigma=0.3)",
    bandwidth="100Mbit",
    eval_every=1,
    threads=1,
)
