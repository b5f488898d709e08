"""The laws run over whatever is registered: a new file needs no new test here.

A test that takes `codec`, `linear_codec`, `reducer` or `compression` is run for each of them, in
the quick run for the first example of each class.
"""

from collections.abc import Generator

import pytest

from gradwire.compression import COMPRESSION
from gradwire.core.chain import Chain
from gradwire.core.codec import Algebra, Codec
from gradwire.core.notation import notation_name
from gradwire.core.reducer import Reducer
from gradwire.testing import NotApplicable
from sampling import cover

CHAINS = (
    "topk(0.3) >> qsgd(bits=4)",
    "topk(0.1) >> fp16",
    "topk(0.3) >> sign",
    "topk(0.5) >> topk(0.5)",
    "topk(0.5) >> randomk(0.5) >> bf16",
    "topk(0.3) >> eden(2, unbiased=False)",
    "topk(0.3) >> srq(4)",
    "randomk(0.3) >> fp16",
    "randomk(0.3) >> qsgd(3, bucket=16)",
    "randomk(0.5, unbiased=True) >> qsgd(7)",
    "fp16 >> bf16",
    "bf16 >> sign",
)

# All that a user can write: the examples of every class, or its bare name where it has none.
EXAMPLES = [
    (COMPRESSION.parse(text), cls)
    for cls in COMPRESSION
    for text in (cls.examples or (notation_name(cls),))
] + [(COMPRESSION.parse(text), Chain) for text in CHAINS]
CODECS = [codec for codec, _ in EXAMPLES if isinstance(codec, Codec)]
ARGUMENTS = {
    "compression": EXAMPLES,
    "codec": [(codec, cls) for codec, cls in EXAMPLES if isinstance(codec, Codec)],
    "reducer": [(reducer, cls) for reducer, cls in EXAMPLES if isinstance(reducer, Reducer)],
    "linear_codec": [
        (codec, cls)
        for codec, cls in EXAMPLES
        if isinstance(codec, Codec) and codec.algebra is Algebra.LINEAR
    ],
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, values in ARGUMENTS.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, cover(values), ids=repr)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """A law that says nothing about its subject is a skipped test."""
    try:
        return (yield)
    except NotApplicable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def codecs() -> list[Codec]:
    """All codecs at once, for laws about several of them."""
    return CODECS
