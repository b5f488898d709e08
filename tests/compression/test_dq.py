"""Dependent quantisation: its error at a given rate, its rate, its bytes, and what it refuses."""

import io
import math

import pytest
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.coding.trellis import Tables, read_tables, to_bytes
from gradwire.compression import COMPRESSION
from gradwire.compression.source_coding import _dq_search
from gradwire.compression.source_coding._dq_quantised import prefers_signs
from gradwire.compression.source_coding.dq import DQ, _root_mean_square
from gradwire.core.errors import WireError
from gradwire.core.fusion import encode_feedback
from gradwire.core.key import Key
from gradwire.core.spec import Spec
from gradwire.experiment.studies.gradients import saved_facts, saved_gradients

KEY = Key(seed=2).private(0)
ROWS = Spec((64 * 96,), torch.float32, tensors=(("w", 0, 64 * 96, (64, 96)),))


def measured(codec, x: Tensor, spec: Spec | None = None) -> tuple[float, float]:
    """Bits per element and relative squared error."""
    spec = spec or Spec.of(x)
    payload, _ = codec.encode(x, codec.init(spec), KEY)
    error = codec.decode(payload, spec, KEY).double() - x.double()
    energy = float(x.double().square().sum())
    return 8 * payload.nbytes / x.numel(), float(error.square().sum()) / energy


def spec_of(name: str, x: Tensor) -> Spec:
    tensors, start = [], 0
    for layer, shape in saved_facts()[name]["layers"].items():
        stop = start + math.prod(shape)
        tensors.append((layer, start, stop, tuple(shape)))
        start = stop
    return Spec(tuple(x.shape), x.dtype, tensors=tuple(tensors))


def outer_product(dtype: torch.dtype = torch.float32) -> Tensor:
    rows, columns = KEY.child("rows").normal(64).exp(), KEY.child("columns").normal(96).exp()
    return (KEY.child("x").normal(64 * 96).view(64, 96) * rows[:, None] * columns).to(dtype)


@pytest.mark.parametrize(
    ("rate", "scalar"), [(0.1, 0.908), (0.25, 0.789), (0.5, 0.617), (1.0, 0.349), (2.0, 0.089)]
)
def test_a_gaussian_costs_less_than_with_a_scalar_quantiser(rate, scalar) -> None:
    """`scalar`: the best entropy-coded scalar quantiser, without a byte around it."""
    x = Key(seed=3).normal(1 << 16)
    bits, error = measured(DQ(rate), x)
    assert 0.98 * rate <= bits <= rate
    assert error * 4.0 ** (bits - rate) <= (1.003 if rate < 0.5 else 0.925) * scalar


@pytest.mark.few(2)
@pytest.mark.parametrize("rate", [0.25, 1.0, 3.0])
@pytest.mark.parametrize("name", ["mlp late", "mnist_cnn early", "nanogpt early"])
def test_gradients_cost_less_than_with_the_best_of_the_others(name, rate) -> None:
    x = saved_gradients()[name]
    spec = spec_of(name, x)
    bits, error = measured(DQ(rate), x, spec)
    assert 0.97 * rate <= bits <= rate
    rivals = (
        "topk(0.03)",
        "topk(0.1)",
        "topk(0.03) >> qsgd(bits=4)",
        "topk(0.1) >> qsgd(bits=6)",
        "qsgd(1) >> rans",
        "qsgd(7) >> rans",
        "eden(1)",
        "eden(3)",
        "sbc(0.03)",
        "stc(0.03)",
    )
    figures = [measured(COMPRESSION.parse(rival), x, spec) for rival in rivals]
    assert error < 0.8 * min(e for b, e in figures if b <= 1.05 * rate)


def test_rows_and_columns_of_a_matrix_are_told_apart() -> None:
    x = outer_product().reshape(-1)
    bits, error = measured(DQ(1.0), x, ROWS)
    flat_bits, flat_error = measured(DQ(1.0), x)
    assert max(bits, flat_bits) <= 1.0
    assert error < 0.8 * flat_error


def test_a_step_is_relative_and_bounds_the_error_of_what_is_not_zero() -> None:
    x = outer_product()
    for scale in (1.0, 1e-20, 1e20):
        codec = DQ(step=0.05)
        payload, _ = codec.encode(x * scale, codec.init(Spec.of(x)), KEY)
        decoded = codec.decode(payload, Spec.of(x), KEY) / scale
        step = 0.05 * float(x.square().mean().sqrt())
        error = (decoded - x).abs()[decoded != 0]
        # The next index of the same parity is four steps away; rate may cost one quantiser cell.
        assert float(error.max()) <= 4.5 * step


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes(dtype) -> None:
    bits, error = measured(DQ(2.0), outer_product(dtype))
    assert bits <= 2.0
    assert error < 0.05


@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("numel", [1, 2, 5, 63, 65, 200, 500, 2000])
def test_something_is_heard_of_few_elements(numel, rate) -> None:
    spike = torch.zeros(numel)
    spike[numel // 2] = -3.0
    gaussian = KEY.child(f"few {numel}").normal(numel)
    for x, most in ((gaussian, 0.96), (torch.ones(numel), 0.99), (spike, 1e-4)):
        bits, error = measured(DQ(rate), x)
        assert bits * numel / 8 <= rate * numel / 8 + 16
        assert error <= most


def test_few_elements_at_a_step() -> None:
    for numel in (1, 2, 5):
        _, error = measured(DQ(step=0.01), torch.ones(numel))
        assert error < 1e-3


@pytest.mark.parametrize(("numel", "most"), [(100, 0.05), (1000, 0.05), (10_000, 0.1)])
def test_numbers_that_are_all_large(numel, most) -> None:
    """As topk leaves them: they take a bit each or none."""
    x = KEY.child("large").normal(10 * numel)
    x = x[x.abs().topk(numel).indices.sort().values]
    bits, error = measured(DQ(1.0), x)
    assert bits * numel / 8 <= numel / 8 + 16
    assert error < most
    _, error = measured(DQ(0.5), x)
    assert error < 0.85


def test_survivors_of_topk_err_no_more_than_with_polar() -> None:
    for numel in (1000, 5000, 100_000):
        x = KEY.child("survivors").normal(numel)
        _, error = measured(COMPRESSION.parse("topk(0.1) >> dq(1.0)"), x)
        _, polar = measured(COMPRESSION.parse("topk(0.1) >> polar(1.0)"), x)
        assert error < polar
    x = saved_gradients()["mnist_cnn early"]
    _, error = measured(COMPRESSION.parse("topk(0.1) >> dq(1.0)"), x)
    assert error < 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("numel", [3, 300, 3000])
def test_very_small_and_very_large_numbers(numel, dtype) -> None:
    x = KEY.child("range").normal(numel).clamp(-3, 3).to(dtype)
    _, expected = measured(DQ(1.0), x)
    small, large = (1e-310, 1e307) if dtype == torch.float64 else (1e-38, 1e38)
    for scale in (1e-30, small, large):
        scaled = x * scale
        for codec in (DQ(1.0), DQ(step=0.3)):
            payload, _ = codec.encode(scaled, None, KEY)
            decoded = codec.decode(payload, Spec.of(x), KEY).double() / scale
            assert bool(torch.isfinite(decoded).all())
            error = (decoded - x.double()).square().sum() / x.double().square().sum()
            assert float(error) <= 1.1 * expected + 0.03
        assert 8 * DQ(1.0).encode(scaled, None, KEY)[0].nbytes <= numel + 8 * 16


@pytest.mark.parametrize("numel", [40, 300, 3000])
def test_bytes_and_error_do_not_depend_on_the_magnitude(numel) -> None:
    x = KEY.child("scaled").normal(numel)
    bits, expected = measured(DQ(1.0), x)
    for exponent in (-115, -80, 98, 105, 120):
        assert measured(DQ(1.0), x * 2.0**exponent) == pytest.approx((bits, expected), rel=1e-3)


@pytest.mark.parametrize("numel", [40, 300, 6144])
def test_what_is_lost_is_what_was_not_decoded(numel) -> None:
    rows = max(1, numel // 96)
    spec = Spec((numel,), torch.float32, tensors=(("w", 0, numel, (rows, numel // rows)),))
    x, codec = KEY.child("lost").normal(numel), DQ(0.5)
    state, residual = codec.init(spec), torch.zeros(numel)
    for step in range(4):
        payload, lost, state = encode_feedback(codec, x, residual, state, KEY)
        assert torch.equal(lost, x + residual - codec.decode(payload, spec, KEY)), step
        residual = lost
    assert float(residual.norm()) < 4 * float(x.norm())


@pytest.mark.slow
def test_short_codes_do_not_depend_on_the_backend(monkeypatch) -> None:
    for numel, rate in ((3, 1.0), (65, 0.5), (90, 2.0), (200, 0.5)):
        x, buffers = KEY.child("short").normal(numel), []
        for backend in ("", "reference"):
            monkeypatch.setenv("GRADWIRE_KERNELS", backend)
            payload = DQ(rate).encode(x, None, KEY)[0]
            buffers.append(payload.buffer)
            buffers.append(DQ(rate).decode(payload, Spec.of(x), KEY))
        assert torch.equal(buffers[0], buffers[2])
        assert torch.equal(buffers[1], buffers[3])


@pytest.mark.parametrize(
    "forged",
    [
        [16, 0, 127],  # peaks: none
        [16, 255, 255, 3],  # not finite
        [16, 0, 0, 3],  # zero
        [16, 0, 127, 255],  # beyond the vector
        [16, 0, 127, 0, 0, 0, 0, 0, 0],  # too many
        [32, 0, 127],  # plain: no bits
        [32, 255, 255, 1],
        [32, 0, 127, 1, 1, 1, 1, 1, 1, 1, 1, 1],
        [8, 0, 0],  # a power of two of nothing
        [8, 0, 0, 0],
        [24, 0, 127, 0, 255, 127],  # too large a power
        [48, 0, 127, 0],
    ],
    ids=str,
)
def test_forged_short_codes_are_refused(forged) -> None:
    with pytest.raises(WireError):
        DQ(0.5).join(
            {"code": torch.tensor(forged, dtype=torch.uint8)}, Spec((5,), torch.float32), KEY
        )


def test_the_root_mean_square_does_not_depend_on_threads() -> None:
    x, found = KEY.child("threads").normal(1 << 16).repeat(600), []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(_root_mean_square(x))
    finally:
        torch.set_num_threads(threads)
    assert len(set(found)) == 1


def test_a_lone_spike_among_tiny_numbers() -> None:
    x = 1e-9 * KEY.child("tiny").normal(5000)
    x[77] = 3.0
    bits, error = measured(DQ(0.2), x)
    assert bits <= 0.2
    assert error < 1e-4
    _, error = measured(DQ(step=2.0**-12), x)
    assert error < 1e-6


@pytest.mark.slow
def test_bytes_do_not_depend_on_the_backend(monkeypatch) -> None:
    x, codec = outer_product().reshape(-1)[:1100], DQ(step=0.4)
    spec = Spec((1100,), x.dtype, tensors=(("w", 0, 1056, (11, 96)), ("b", 1056, 1100, (44,))))
    payloads, decoded = [], []
    for backend in ("", "reference"):
        monkeypatch.setenv("GRADWIRE_KERNELS", backend)
        payloads.append(codec.encode(x, codec.init(spec), KEY)[0])
        decoded.append(codec.decode(payloads[-1], spec, KEY))
    assert torch.equal(payloads[0].buffer, payloads[1].buffer)
    assert torch.equal(*decoded)


def test_long_vectors_are_coded_in_segments() -> None:
    x = KEY.child("long").normal(600_000)
    spec = Spec(tuple(x.shape), x.dtype, tensors=(("w", 0, 600_000, (600, 1000)),))
    bits, error = measured(DQ(0.5), x, spec)
    assert 0.98 * 0.5 <= bits <= 0.5
    assert error < 0.62
    # One that begins where no block does would start in the wrong state.
    codec = DQ(step=0.4)
    decoded = codec.decode(codec.encode(x, codec.init(spec), KEY)[0], spec, KEY)
    first, second = (decoded - x).square().view(2, -1).mean(dim=1).tolist()
    assert second == pytest.approx(first, rel=0.02)


def test_error_feedback_sends_it_all_in_the_end() -> None:
    x, codec = outer_product(), DQ(0.5)
    residual, total, state = torch.zeros_like(x), torch.zeros_like(x), codec.init(Spec.of(x))
    for _ in range(20):
        payload, residual, state = encode_feedback(codec, x, residual, state, KEY)
        assert 8 * payload.nbytes <= 0.5 * x.numel()
        total += codec.decode(payload, Spec.of(x), KEY)
    assert float((total / 20 - x).square().sum() / x.square().sum()) < 0.01


@pytest.mark.few
@pytest.mark.parametrize("rate", [0.5, 1.0, 1.5, 2.0])
@pytest.mark.parametrize("tails", [(1.0, 2.5), (2.5, 1.0)], ids=str)
def test_what_was_chosen_once_follows_the_vectors(tails, rate) -> None:
    """Tails that grow or shrink: plane or trellis, and where zero is a value, are chosen anew."""
    codec, numel, calls = DQ(rate), 12_000, 30
    spec = Spec((numel,), torch.float32)
    state, ways = codec.init(spec), set()

    def squared_error(payload) -> float:
        return float((codec.decode(payload, spec, KEY) - x).square().sum())

    for step in range(calls + 6):
        z, share = KEY.child(f"drift {step}").normal(numel), min(step / calls, 1.0)
        x = z.sign() * z.abs() ** (tails[0] * (1 - share) + tails[1] * share)
        payload, state = codec.encode(x, state, KEY)
        ways.add(state["start"]["way"])
        if step % 5 == 0:
            fresh, _ = codec.encode(x, codec.init(spec), KEY)
            assert squared_error(payload) <= 1.1 * squared_error(fresh), step
    assert len(ways) > 1 or rate == 0.5  # where signs hardly matter


def test_a_choice_that_still_holds_is_not_made_again(monkeypatch) -> None:
    chosen = []
    monkeypatch.setattr(
        _dq_search, "prefers_signs", lambda *a: chosen.append(1) or prefers_signs(*a)
    )
    codec, numel = DQ(0.5), 5000
    state = codec.init(Spec((numel,), torch.float32))
    for step in range(140):
        x = KEY.child(f"alike {step}").normal(numel) * 1.1**step
        _, state = codec.encode(x, state, KEY)
    assert 2 <= len(chosen) <= 4  # at first, after 128 calls, and by chance


def test_state_is_plain_data_and_may_lack_a_choice() -> None:
    x, codec = KEY.child("kept").normal(5000), DQ(1.0)
    payload, state = codec.encode(x, codec.init(Spec.of(x)), KEY)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    again = torch.load(file, weights_only=True)
    assert torch.equal(codec.encode(x, again, KEY)[0].buffer, codec.encode(x, state, KEY)[0].buffer)
    del again["start"]["choice"]
    assert torch.equal(codec.encode(x, again, KEY)[0].buffer, payload.buffer)


def test_tables_survive_the_wire() -> None:
    generator = torch.Generator().manual_seed(1)
    for size in (0, 3, 1000, 10**6):
        counts = torch.randint(0, size + 1, (32, 4), generator=generator)
        tables = Tables(*kernels.trellis_tables(counts))
        packed = torch.frombuffer(bytearray(to_bytes(tables.bits)), dtype=torch.uint8)
        again, used = read_tables(packed)
        assert used == packed.numel()
        assert torch.equal(again.levels, tables.levels)


def test_forged_bytes_are_refused() -> None:
    x = outer_product().reshape(-1)
    codec, spec = DQ(0.5), Spec.of(x)
    code = codec.encode(x, codec.init(spec), KEY)[0].parts["code"]

    def decode(forged: Tensor) -> None:
        codec.join({"code": forged}, spec.flat(), KEY)

    decode(code)
    for forged in (
        code[:0],
        code[:4],
        code[:9],
        code[:-1],
        code[:-2],
        torch.cat([code, code[:2]]),
        torch.cat([code[:1], torch.full((4,), 255, dtype=torch.uint8), code[5:]]),  # a NaN
        torch.cat([torch.tensor([9], dtype=torch.uint8), code[1:]]),
        torch.zeros(2, dtype=torch.uint8),
    ):
        with pytest.raises(WireError):
            decode(forged)


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="one of them"):
        DQ()
    with pytest.raises(ValueError, match="one of them"):
        DQ(0.5, step=0.1)
    with pytest.raises(ValueError, match=r"\(0, 12\]"):
        DQ(0.0)
    with pytest.raises(ValueError, match="step must lie"):
        DQ(step=0.0)
