"""The fuzz target itself: it accepts good decoders and finds bad ones. `make fuzz` runs it."""

import importlib.util
import random
import struct
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gradwire.core.codec import Codec, Kind, Parts, State
from gradwire.core.key import Key
from gradwire.core.spec import Spec

_FILE = Path(__file__).with_name("fuzz_decoders.py")


@pytest.fixture(scope="module")
def fuzz():
    spec = importlib.util.spec_from_file_location("fuzz_decoders", _FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True, repr=False)
class Trusting(Codec):
    """Believes what it is sent, in one of three ways."""

    leaves = Kind.NOTHING
    parts = ("where", "what")
    mistake: str = ""

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        where = torch.tensor([x.numel()], dtype=torch.int64)
        return {"where": where, "what": x.float()}, state

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        if self.mistake == "size":
            return torch.zeros(int(parts["where"].sum()) % 2**22, dtype=spec.dtype)[: spec.numel]
        out = torch.zeros(spec.numel, dtype=spec.dtype)
        if self.mistake == "index":
            out[parts["where"] - 1] = 1
        return out[: parts["what"].numel()] if self.mistake == "length" else out


def test_no_decoder_falls_for_some_random_inputs(fuzz) -> None:
    assert fuzz.run_blind(fuzz.Fuzzer().one, seconds=600, count=400, seed=1) == 400


def test_messages_that_merge_and_codes_of_several_chunks_are_among_them(fuzz) -> None:
    fuzzer = fuzz.Fuzzer(["gtopk", "huffman"])
    assert {repr(codec).split("(")[0] for codec in fuzzer.codecs} >= {"messages of gtopk"}
    assert max(spec.numel for spec in fuzz.SPECS) > 2 * 2048
    assert fuzz.run_blind(fuzzer.one, seconds=600, count=400, seed=7) == 400


@pytest.mark.parametrize("mistake", ["size", "index", "length"])
def test_a_trusting_decoder_is_found_out(fuzz, mistake, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(fuzz, "FOUND", tmp_path)
    fuzzer = fuzz.Fuzzer(["sign"])
    fuzzer.codecs = [Trusting(mistake)]
    with pytest.raises(AssertionError, match="trusting"):
        fuzz.run_blind(fuzzer.one, seconds=600, count=5000, seed=2)
    (found,) = tmp_path.iterdir()
    with pytest.raises(AssertionError, match="trusting"):  # and again, from the file
        fuzzer.one(found.read_bytes())


def test_inputs_of_any_length_are_read(fuzz) -> None:
    fuzzer, generator = fuzz.Fuzzer(["sign", "topk"]), random.Random(3)
    for length in range(64):
        fuzzer.one(generator.randbytes(length))
    fuzzer.one(struct.pack("<I", 0))
