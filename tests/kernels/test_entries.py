"""Entries of several vectors in one call of C: the payloads of one vector after another.

The reference makes them one after another, of parts.
"""

import pytest
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compression import COMPRESSION
from gradwire.compression.sparsification._families import SelectorFusion
from gradwire.core.codec import unpack
from gradwire.core.key import Key
from gradwire.core.payload import Payload
from gradwire.core.payload_rows import PiecePayload
from gradwire.core.spec import Spec
from gradwire.runtime.virtual.coding_time import touched_nbytes

CPU = torch.device("cpu")
CODECS = ("topk(0.05)", "sampledk(0.05)")  # without and with the number of positions
UNIVERSES = (1, 2, 7, 8, 9, 300, 4099, 1 << 20, 1 << 40)


def sets(universe: int) -> list[Tensor]:
    """Of each kind that there is: empty, full, tiny, random of several densities, clustered."""
    generator = torch.Generator().manual_seed(universe % 1009)
    found = [torch.arange(0), torch.tensor([0]), torch.tensor([universe - 1])]
    if universe <= 4099:
        order = torch.randperm(universe, generator=generator)
        counts = {1, 2, 3, universe // 100, universe // 3, universe - 1, universe}
        found += [order[:count].sort().values for count in counts if count <= universe]
    else:
        drawn = torch.randint(universe, (900,), generator=generator)
        found += [drawn[:count].unique() for count in (1, 2, 270, 900)]
    if universe > 200:
        starts = torch.tensor([0, universe // 3, universe - 40])
        found.append((starts[:, None] + torch.arange(40)).flatten().unique())
        powers = 1 << torch.arange(universe.bit_length() - 1)  # gaps of every length
        found += [powers - 1, (powers[:, None] + torch.arange(3) - 1).flatten().unique()]
        found[-1] = found[-1][found[-1] < universe]
    return found


def selections(universe: int) -> list[tuple[Tensor, Tensor]]:
    key = Key(seed=5)
    return [(own, key.child(i).normal(len(own))) for i, own in enumerate(sets(universe))]


def both(text: str, universe: int) -> tuple[list[Payload], list[Payload], Spec]:
    codec, spec = COMPRESSION.parse(text), Spec((universe,), torch.float32)
    chosen, fusion = selections(universe), codec.fusion
    together = fusion.pack_rows(chosen, spec, CPU)
    return list(together), list(SelectorFusion.pack_rows(fusion, chosen, spec, CPU)), spec


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("universe", UNIVERSES)
@pytest.mark.parametrize("text", CODECS)
def test_payloads_are_those_of_one_after_another(text: str, universe: int) -> None:
    together, alone, _ = both(text, universe)
    assert len(together) == len(alone)
    for own, expected in zip(together, alone):
        assert type(own) is PiecePayload
        assert own.buffer.tolist() == expected.buffer.tolist()
        assert own.nbytes == expected.nbytes
        assert own.parts_nbytes == expected.parts_nbytes
        assert own.buffer.data_ptr() % 8 == 0
        assert not own.has_views
        assert touched_nbytes((len, ()), own) == touched_nbytes((len, ()), expected)
        assert not own.has_views
        assert list(own.parts) == list(expected.parts)
        for name, part in own.parts.items():
            assert part.dtype == expected.parts[name].dtype
            assert torch.equal(part, expected.parts[name])
        assert repr(own) == repr(expected)
        assert touched_nbytes((len, ()), own) == touched_nbytes((len, ()), expected)
        Payload.unpack(own.buffer, ("indices", "values"), own.context)


@pytest.mark.usefixtures("native")
def test_every_code_is_among_them() -> None:
    front = {"topk(0.05)": 0, "sampledk(0.05)": 2}
    for text, skipped in front.items():
        codes = set()
        for universe in (300, 4099):
            for payload in both(text, universe)[0]:
                codes.update(payload.parts["indices"][skipped : skipped + 1].tolist())
        assert {0, 33, 34} < codes
        assert len(codes - {0, 33, 34}) > 3  # Rice's, of several parameters


@pytest.mark.usefixtures("native")
def test_payloads_elsewhere_have_their_bytes_on_the_host() -> None:
    codec = COMPRESSION.parse("sampledk(0.05)")
    spec = Spec((4099,), torch.float32)
    for payload in codec.fusion.pack_rows(selections(4099), spec, CPU):
        there, host = payload.buffer.clone(), payload.buffer  # as on an accelerator
        assert isinstance(payload, PiecePayload)
        moved = PiecePayload(there, host, payload._places, payload.context, payload.parts_nbytes)
        assert kernels.noted(moved.buffer, "host") is host
        for name, part in moved.parts.items():
            assert part.untyped_storage().data_ptr() == there.untyped_storage().data_ptr()
            assert torch.equal(kernels.noted(part, "host"), payload.parts[name])
        received = unpack(codec, moved.buffer, spec)
        key = Key(seed=1)
        assert torch.equal(codec.decode(received, spec, key), codec.decode(payload, spec, key))


def test_without_the_c_library_they_are_made_one_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GRADWIRE_KERNELS", "reference")
    together, alone, _ = both("sampledk(0.05)", 300)
    assert all(type(own) is Payload for own in together)
    for own, expected in zip(together, alone):
        assert torch.equal(own.buffer, expected.buffer)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("positions", [[3, 3], [4, 2], [-1, 5], [1, 10], [0, 1, 2, 4, 3]])
def test_positions_out_of_order_or_range_are_refused(positions: list[int]) -> None:
    own = torch.tensor([2, 7, *positions])
    with pytest.raises(ValueError, match=r"increase strictly in 0 \.\. 9"):
        kernels.encode_entries(
            own, torch.ones(len(own)), [2, len(positions)], 10, 1, bytes(4), (0, 7), 0
        )


@pytest.mark.usefixtures("native")
def test_what_does_not_fit_together_is_refused() -> None:
    two = torch.tensor([1, 2])
    for arguments in (
        (two.int(), torch.ones(2), [2], 9, 0, bytes(4)),
        (two, torch.ones(2).double(), [2], 9, 0, bytes(4)),
        (two, torch.ones(2), [1], 9, 0, bytes(4)),
        (two, torch.ones(2), [3, -1], 9, 0, bytes(4)),
        (two, torch.ones(2), [2], 2**62, 0, bytes(4)),
        (two, torch.ones(2), [2], 9, 9, bytes(4)),
        (two, torch.ones(2), [2], 9, 0, bytes(3)),
    ):
        with pytest.raises(ValueError, match="encode_entries takes"):
            kernels.encode_entries(*arguments, (0, 7), 0)  # type: ignore[arg-type]
