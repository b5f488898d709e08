"""Can bytes from the network hurt a decoder? Fuzzes every registered codec, chains, and merges.

    make fuzz FUZZ_SECONDS=600
    python tests/fuzz/fuzz_decoders.py runs/fuzz-crash-1234...      # one input again

An input chooses a codec, a tensor and a way to make bytes: anything at all; anything behind a
valid checksum; an honest payload with some bytes changed and sealed again; parts of wrong lengths,
dtypes and contents under the right checksum. Whatever comes, the answer is `WireError` or a tensor
of the right shape and dtype. No operation may make a tensor much larger than the declared one and
the message together, and the address space is limited, so a forged length is found out.

With atheris (libFuzzer, guided by coverage of the Python code; `pip install atheris`) inputs grow
where they reach new code. Without it the same target gets random inputs and mutations of them,
blind to coverage: worth less per second, but it runs everywhere.
"""

import argparse
import contextlib
import random
import resource
import sys
import time
import traceback
import zlib
from pathlib import Path
from typing import Any

try:
    import atheris
except ImportError:
    atheris = None

_ALONE = __name__ == "__main__"  # modules are instrumented while they are imported
with atheris.instrument_imports(["gradwire"]) if atheris and _ALONE else contextlib.nullcontext():
    import torch
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode

    from gradwire.compression import COMPRESSION
    from gradwire.compression.sparsification._selection import scatter
    from gradwire.compression.sparsification.gtopk import _Tree
    from gradwire.compression.sparsification.topk import TopK
    from gradwire.core.codec import Algebra, Codec, finalize, merge, payload_context, unpack
    from gradwire.core.errors import WireError
    from gradwire.core.key import Key
    from gradwire.core.notation import notation_name
    from gradwire.core.payload import Payload
    from gradwire.core.spec import Spec

    COMPRESSION.names()  # imports them all

CHAINS = (
    "topk(0.1) >> qsgd(bits=4)",
    "topk(0.1) >> sign",
    "topk(0.5) >> topk(0.5) >> fp16",
    "randomk(0.3) >> qsgd(3, bucket=16)",
)
SPECS = (
    Spec((13,), torch.float32),
    Spec((600,), torch.float32),
    Spec((0,), torch.float32),
    Spec((1,), torch.float64),
    Spec((5, 7), torch.float64),
    Spec((67,), torch.float16),
    Spec((2, 300), torch.bfloat16),
    Spec((4500,), torch.float32),  # Huffman's code has three chunks, with an index of their lengths
)
DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
FOUND = Path("runs")  # where inputs that fail are kept
KEY = Key(seed=4).private(0)
MAX_BYTES = 4096  # of an input
HEADROOM_BYTES = 1 << 30  # what the process may map beyond what it has after importing torch


class Merges(TopK):
    """The messages of gtopk: what one node reads of another, merged with an honest one, read."""

    def __repr__(self) -> str:
        return f"messages of gtopk({self.density})"

    def decode(self, payload: Payload, spec: Spec, key: Key) -> Tensor:
        codec = TopK(self.density)
        tree = _Tree(codec, spec.flat())
        payload = Payload.pack(payload.parts, payload_context(codec, spec.flat()))
        own = tree.select(KEY.normal(spec.numel).to(spec.dtype)).buffer
        indices, values = tree.read(tree.merge(tree.merge(payload.buffer, own), payload.buffer))
        return scatter(values, indices, spec.flat()).reshape(spec.shape)


class _Bounded(TorchDispatchMode):
    """Refuses operations whose result is far larger than what a decoder may need."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.untyped_storage().nbytes() > self.limit:
            raise AssertionError(
                f"{function} made {result.untyped_storage().nbytes()} bytes, limit {self.limit}"
            )
        return result


class _Input:
    """Reads choices off the front of the fuzzer's bytes; past the end they are zero."""

    def __init__(self, data: bytes) -> None:
        self.data, self.position = data, 0

    def take(self, count: int) -> bytes:
        taken = self.data[self.position : self.position + count]
        self.position += count
        return taken

    def number(self, high: int) -> int:
        """0 .. high - 1."""
        width = 1 if high <= 256 else 2
        return int.from_bytes(self.take(width), "little") % max(1, high)

    def rest(self) -> bytes:
        return self.take(len(self.data))

    def __bool__(self) -> bool:
        return self.position < len(self.data)


class Fuzzer:
    """The target: what to decode, and the honest payloads that inputs start from."""

    def __init__(self, names: list[str] | None = None) -> None:
        texts = [t for cls in COMPRESSION for t in (cls.examples or (notation_name(cls),))]
        expressions = [COMPRESSION.parse(text) for text in (*texts, *CHAINS)]
        self.codecs = [c for c in expressions if isinstance(c, Codec)]
        self.codecs += [Merges(0.1), Merges(1.0)]
        if names:
            self.codecs = [c for c in self.codecs if any(name in repr(c) for name in names)]
        self._honest: dict[tuple[int, int], Payload] = {}

    def honest(self, codec: int, spec: int) -> Payload:
        if (codec, spec) not in self._honest:
            chosen = self.codecs[codec]
            x = KEY.child("x").normal(SPECS[spec].numel).to(SPECS[spec].dtype)
            x = x.reshape(SPECS[spec].shape)
            payload, _ = chosen.encode(x, chosen.init(SPECS[spec]), KEY)
            self._honest[codec, spec] = payload
        return self._honest[codec, spec]

    def one(self, data: bytes) -> None:
        """Raises AssertionError, with the codec and the tensor, if a decoder misbehaves."""
        source = _Input(data)
        codec, spec = source.number(len(self.codecs)), source.number(len(SPECS))
        payload = self.honest(codec, spec)
        context = payload_context(self.codecs[codec], SPECS[spec])
        if self.codecs[codec].traits.coder is not None:
            context = payload.context
        make = (_anything, _sealed, _changed, _parts)[source.number(4)]
        buffer = make(source, payload, context)
        try:
            self._receive(self.codecs[codec], SPECS[spec], buffer, payload)
        except WireError:
            pass
        except Exception as error:
            raise AssertionError(
                f"{self.codecs[codec]!r} on {SPECS[spec]} ({make.__name__}): {error!r}"
            ) from error

    def _receive(self, codec: Codec, spec: Spec, buffer: Tensor, honest: Payload) -> None:
        # Decoders work in float64 or int64 here and there, and pad to whole buckets.
        limit = 64 * (8 * spec.numel + buffer.numel()) + (1 << 16)
        with _Bounded(limit):
            payload = unpack(codec, buffer, spec)
            _check(codec.decode(payload, spec, KEY), spec)
            if codec.algebra is Algebra.MERGE:
                merged = merge(codec, payload, honest)
                final = finalize(codec, unpack(codec, merged.buffer, spec), spec, 2)
                _check(codec.decode(final, spec, KEY.shared()), spec)


def _check(decoded: Tensor, spec: Spec) -> None:
    assert (tuple(decoded.shape), decoded.dtype) == (spec.shape, spec.dtype), (
        f"decoded to {decoded.dtype} {list(decoded.shape)}"
    )
    decoded.sum()  # touches every byte


def _buffer(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)[: len(data)]


def _seal(data: bytearray, context: int) -> Tensor:
    """With the checksum that belongs to these bytes: what a malicious sender would do."""
    if len(data) >= 8:
        crc = zlib.crc32(data[8:], zlib.crc32(data[:4], context))
        data[4:8] = crc.to_bytes(4, "little")
    return _buffer(bytes(data))


def _anything(source: _Input, honest: Payload, context: int) -> Tensor:
    return _buffer(source.rest())


def _sealed(source: _Input, honest: Payload, context: int) -> Tensor:
    header = bytes([0x57, 1, len(honest.parts), 0, 0, 0, 0, 0])
    return _seal(bytearray(header + source.rest()), context)


def _changed(source: _Input, honest: Payload, context: int) -> Tensor:
    data = bytearray(honest.buffer.numpy().tobytes())
    while source:
        position = source.number(len(data))
        data[position] = source.number(256)
    return _seal(data, context)


def _parts(source: _Input, honest: Payload, context: int) -> Tensor:
    parts: dict[str, Tensor] = {}
    for name, part in honest.parts.items():
        choice = source.number(8)
        dtype = DTYPES[source.number(len(DTYPES))] if choice == 7 else part.dtype
        count = source.number(600) if choice >= 5 else part.numel()
        if choice == 0:
            parts[name] = part
        elif choice <= 2:  # honest but for a few bytes
            raw = bytearray(part.view(torch.uint8).numpy().tobytes())
            for _ in range(source.number(8) if raw else 0):
                raw[source.number(len(raw))] = source.number(256)
            parts[name] = _buffer(bytes(raw)).view(dtype)
        else:  # the fuzzer's own bytes, over and over
            size = count * dtype.itemsize
            pattern = source.take(1 + source.number(64)) or b"\0"
            raw = bytearray((pattern * (size // len(pattern) + 1))[:size])
            parts[name] = _buffer(bytes(raw)).view(dtype)
    return Payload.pack(parts, context).buffer


def limit_memory() -> None:
    """A forged length cannot ask for more than this: allocating fails, and that is a finding."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + HEADROOM_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def mutate(generator: random.Random, pool: list[bytes]) -> bytes:
    """A new random input, or an old one with some bytes changed, cut or repeated."""
    if not pool or generator.random() < 0.3:
        return generator.randbytes(generator.choice((4, 8, 16, 64, 256)))
    data = bytearray(generator.choice(pool))
    for _ in range(generator.randint(1, 6)):
        start = generator.randrange(len(data) + 1)
        stop = min(len(data), start + generator.randint(1, 8))
        kind = generator.randrange(4)
        if kind == 0:
            data[start:stop] = generator.randbytes(stop - start)
        elif kind == 1:
            data[start:stop] = bytes([generator.choice((0, 1, 0x7F, 0x80, 0xFF))]) * (stop - start)
        elif kind == 2:
            data[start:start] = generator.randbytes(generator.randint(1, 8))
        else:
            del data[start:stop]
    return bytes(data[:MAX_BYTES])


def run_blind(one: Any, seconds: float, count: int, seed: int) -> int:
    """Random inputs without coverage, until the time is up or there were `count`."""
    generator, pool, done = random.Random(seed), [], 0
    end = time.monotonic() + seconds
    while time.monotonic() < end and (not count or done < count):
        data = mutate(generator, pool)
        try:
            one(data)
        except AssertionError:
            (FOUND / f"fuzz-crash-{zlib.crc32(data):08x}").write_bytes(data)
            raise
        done += 1
        if len(pool) < 1000:
            pool.append(data)
        else:
            pool[generator.randrange(len(pool))] = data
    return done


class _KeepGoing:
    """Prints each kind of failure once instead of stopping at the first."""

    def __init__(self, one: Any) -> None:
        self.one, self.seen = one, set()

    def __call__(self, data: bytes) -> None:
        try:
            self.one(data)
        except AssertionError as error:
            cause = error.__cause__ or error
            frame = traceback.extract_tb(cause.__traceback__)[-1]
            kind = (str(error).split(" on Spec")[0], type(cause), frame.filename, frame.lineno)
            if kind not in self.seen:
                self.seen.add(kind)
                where = f"{frame.filename}:{frame.lineno}"
                print(f"FAILED {error}\n    {where}\n    input {data.hex()}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="inputs to run again")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--only", nargs="*", help="codecs whose notation contains one of these")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at a failure")
    parser.add_argument("--blind", action="store_true", help="do without atheris")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    options = parser.parse_args()
    torch.set_num_threads(1)
    fuzzer = Fuzzer(options.only)
    one = _KeepGoing(fuzzer.one) if options.keep_going else fuzzer.one
    if options.files:
        for path in options.files:
            one(path.read_bytes())
        return
    for codec in range(len(fuzzer.codecs)):
        for spec in range(len(SPECS)):
            fuzzer.honest(codec, spec)
    FOUND.mkdir(exist_ok=True)
    limit_memory()
    guided = atheris is not None and not options.blind
    how = "atheris, guided by coverage" if guided else "random mutations, no coverage"
    print(f"{len(fuzzer.codecs)} codecs, {options.seconds:g} s, {how}, seed {options.seed}")
    if guided:
        arguments = [
            sys.argv[0],
            f"-max_total_time={options.seconds:.0f}",
            f"-max_len={MAX_BYTES}",
            f"-seed={options.seed}",
            "-timeout=10",
            "-rss_limit_mb=4096",
            "-print_final_stats=1",
            f"-artifact_prefix={FOUND}/fuzz-",
        ]
        atheris.Setup(arguments, one)
        atheris.Fuzz()
    print(f"{run_blind(one, options.seconds, 0, options.seed)} inputs, no failure")


if __name__ == "__main__":
    main()
