"""How many copies of the tensor does each codec cost?

25 million float32 (100 MB), one thread. A row is the best time of several over the best time of
memcpy of the same tensor, in one run: `kernel` is the C kernel into a buffer that exists, `codec`
the whole of encode_feedback, encode or decode_mean as a reducer calls it (payload packed and
checksummed, memory from the pool), `torch` the composition of torch operations that the codec falls
back to (GRADWIRE_KERNELS=reference), measured once. `--quick` leaves `torch` out. Compare `torch`
with `codec`: both make a payload, `kernel` does not. `2 threads` is how many times as fast the
kernel is on two threads; beside it, for memcpy, what memory allows: its halves copied by two
threads.

Answer: 0.3 to 3.5 copies, all within the goals, ef + qsgd just so. Momentum correction (dgc) reads
and writes a velocity in the same pass, which adds a copy and a half. The payload adds a copy and a
checksum: 0.4 copies to qsgd, 2 to fp16. The second thread gains what memory leaves: a memcpy in
halves takes 1.2 to 1.3 times less, kernels with arithmetic to do 1.4 to 2.3 times. Against `torch`
the codecs are 23 times as fast or more, but sampledk 7, randomk and fp16 1.6: their torch
operations are near memory speed themselves. Figures, hardware and commit: README.md.
"""

import argparse
import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from gradwire import kernels
from gradwire.compression import COMPRESSION
from gradwire.compression.feedback.dgc import make_motion
from gradwire.compression.sparsification._selection import sampled_threshold
from gradwire.core.fusion import decode_mean, encode_feedback
from gradwire.core.key import Key
from gradwire.core.spec import Spec
from timing import best_s

NUMEL = 25_000_000
KEY = Key(seed=1).private(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="leave the torch operations out")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    x, residual = KEY.normal(NUMEL), 0.3 * KEY.child("residual").normal(NUMEL)
    velocity = 2.0 * KEY.child("velocity").normal(NUMEL)
    out, copy, half = torch.zeros(NUMEL), torch.zeros(NUMEL), torch.zeros(NUMEL).half()
    k, spec = NUMEL // 100, Spec.of(x)
    parse = COMPRESSION.parse
    sign, buckets, qsgd = parse("sign"), parse("sign(bucket=4096)"), parse("qsgd(bits=4)")
    topk, sampledk, randomk = (
        parse("topk(0.01)"),
        parse("sampledk(0.01, sample_ratio=0.001)"),
        parse("randomk(0.01)"),
    )
    payload = sign.encode(x, None, KEY)[0]
    packed, scale = payload.parts["values"], payload.parts["scale"]
    levels = (7, 512, 4, KEY.seed, KEY.stream)

    def corrected(method: str) -> object:
        """What a worker does in a step of dgc, but for the mean: as for the codecs above."""
        dgc = parse(method)
        motion = make_motion(dgc, x, {"residual": residual, "velocity": velocity}, 1)
        return encode_feedback(dgc.compression, x, motion, None, KEY)

    def threshold() -> object:
        bound = float(sampled_threshold(x, 0.01, 0.001, KEY, residual))
        return kernels.select_above(x, residual, bound, 2 * k, out)

    Operation = Callable[[], object]
    rows: dict[str, tuple[float, Operation, Operation]] = {
        "ef + sign + pack + residual": (
            2.5,
            lambda: kernels.encode_signs(x, residual, NUMEL, out),
            lambda: encode_feedback(sign, x, residual, None, KEY),
        ),
        "ef + sign(bucket=4096) + pack + residual": (
            2.5,
            lambda: kernels.encode_signs(x, residual, 4096, out),
            lambda: encode_feedback(buckets, x, residual, None, KEY),
        ),
        "decode and average 4 sign payloads": (
            2.0,
            lambda: kernels.mean_signs([packed] * 4, [scale] * 4, NUMEL, NUMEL, out),
            lambda: decode_mean(sign, [payload] * 4, spec, [KEY] * 4),
        ),
        "qsgd 4 bit, stochastic, packed": (
            3.0,
            lambda: kernels.encode_levels(x, None, *levels),
            lambda: qsgd.encode(x, None, KEY),
        ),
        "ef + qsgd 4 bit + residual": (
            3.5,
            lambda: kernels.encode_levels(x, residual, *levels, out),
            lambda: encode_feedback(qsgd, x, residual, None, KEY),
        ),
        "ef + sampled-threshold top-k 1% + residual": (
            3.0,
            threshold,
            lambda: encode_feedback(sampledk, x, residual, None, KEY),
        ),
        "ef + exact top-k 1% + residual": (
            8.0,
            lambda: kernels.select_largest(x, residual, k, out),
            lambda: encode_feedback(topk, x, residual, None, KEY),
        ),
        "randomk 1%, shared seed": (
            1.0,
            lambda: kernels.strata_values(x, k, KEY.seed, KEY.stream),
            lambda: randomk.encode(x, None, KEY),
        ),
        "fp16 cast into a buffer": (
            1.5,
            lambda: kernels.narrow(x, half),
            lambda: parse("fp16").encode(x, None, KEY),
        ),
    }
    matrix = x[: NUMEL - NUMEL % 4096].reshape(-1, 4096)
    flips = kernels.pack_signs(residual[: matrix.numel()])
    rows["rotation (fast Hadamard, 4096) + 1 bit"] = (
        8.0,
        lambda: kernels.rotated_signs(matrix, flips),
        lambda: parse("drive").encode(x, None, KEY),
    )
    fed = parse("topk(0.01) >> qsgd(bits=4)")
    rows["ef + exact top-k 1% >> qsgd 4 bit"] = (
        8.0,
        lambda: kernels.select_largest(x, residual, k, out),
        lambda: encode_feedback(fed, x, residual, None, KEY),
    )

    moved = torch.zeros(NUMEL)
    motion = kernels.Motion(residual, velocity, moved, 0.9, masks=True)
    rows["dgc: ef + velocity + sampled top-k 0.1%"] = (
        6.0,
        lambda: kernels.select_above(
            x, motion, sampled_threshold(x, 0.001, 0.001, KEY, motion), 2 * k, out
        ),
        lambda: corrected("dgc(0.001)"),
    )
    rows["dgc: ef + velocity + exact top-k 0.1%"] = (
        6.0,
        lambda: kernels.select_largest(x, motion, k // 10, out),
        lambda: corrected("dgc(topk(0.001))"),
    )
    rows["dgc with clip: the norm first, then the same"] = (
        6.0,
        lambda: (kernels.moments(x), kernels.select_largest(x, motion, k // 10, out)),
        lambda: corrected("dgc(topk(0.001), clip=1.0)"),
    )

    def memcpy(part: int = 0, parts: int = 1) -> None:
        size = 4 * NUMEL // parts
        ctypes.memmove(copy.data_ptr() + part * size, x.data_ptr() + part * size, size)

    def memcpy_halves() -> None:
        list(pool.map(memcpy, (0, 1), (2, 2)))

    pool = ThreadPoolExecutor(2)
    memcpy_s = memcpy2_s = float("inf")
    best = {name: [float("inf")] * 4 for name in rows}
    for _ in range(arguments.rounds):  # memcpy and everything else take turns
        for name, (_, kernel, codec) in rows.items():
            memcpy_s = min(memcpy_s, best_s(memcpy, 2))
            memcpy2_s = min(memcpy2_s, best_s(memcpy_halves, 2))
            for column, operation in ((0, kernel), (2, codec)):
                best[name][column] = min(best[name][column], best_s(operation, 3))
            torch.set_num_threads(2)
            best[name][1] = min(best[name][1], best_s(kernel, 3))
            torch.set_num_threads(1)
    if not arguments.quick:
        os.environ["GRADWIRE_KERNELS"] = "reference"
        for name, (_, _, codec) in rows.items():
            best[name][3] = best_s(codec, 1)
    header = "".join(f"{name:>11}" for name in ("kernel", "2 threads", "codec", "torch"))
    print(f"memcpy of {4e-6 * NUMEL:.0f} MB: {memcpy_s * 1e3:.1f} ms", flush=True)
    print(f"{'time / memcpy of the same tensor':44}{'goal':>6}{header}")
    print(f"{'memcpy':44}{'':6}{1:11.2f}{memcpy_s / memcpy2_s:10.2f}x")
    for name, (goal, _, _) in rows.items():
        kernel_s, two_s, codec_s, torch_s = best[name]
        print(
            f"{name:44}{goal:6.1f}{kernel_s / memcpy_s:11.2f}{kernel_s / two_s:10.2f}x"
            f"{codec_s / memcpy_s:11.2f}{torch_s / memcpy_s:11.2f}"
        )


if __name__ == "__main__":
    main()
