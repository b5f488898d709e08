"""The table of codecs: figures that are known beforehand, and the page made of them. Nothing is
said about times, which are what they are.
"""

import io
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from gradwire.cli import main
from gradwire.compression import COMPRESSION
from gradwire.core.codec import Codec
from gradwire.core.notation import notation_name
from gradwire.core.spec import Spec
from gradwire.experiment.studies import codecs, gradients

PAGE = Path(__file__).resolve().parents[2] / "docs" / "codecs.md"
SMALL = 20_000


@pytest.fixture(scope="module")
def measured():
    only = ["identity", "sign", "topk(0.01)", "topk(0.01) >> fp16", "ef(identity)", "ef(topk(0.1))"]
    return codecs.measure(only, SMALL)


def row(measured, method, kind):
    (found,) = (r for r in measured["codecs"] if r["method"] == method and r["input"] == kind)
    return found


def test_every_codec_and_reducer_is_measured_once() -> None:
    written = codecs.methods()
    assert len(set(written)) == len(written)
    for cls in COMPRESSION:
        assert (cls.examples or (notation_name(cls),))[0] in written


def test_a_name_stands_for_its_first_example() -> None:
    assert [repr(c) for c in codecs.chosen(["topk", "topk(0.5) >> fp16", "topk"])] == [
        "topk(0.01)",
        "topk(0.5) >> fp16",
    ]


def test_bits_are_the_payloads(measured) -> None:
    spec = Spec((SMALL,), torch.float32)
    x = codecs.inputs(SMALL)["gaussian"]
    for method in ("identity", "sign", "topk(0.01)"):
        codec = COMPRESSION.parse(method)
        assert isinstance(codec, Codec)
        payload, _ = codec.encode(x, codec.init(spec), codecs._KEY.private(0))
        assert row(measured, method, "gaussian")["bits"] == 8 * payload.nbytes / SMALL
    assert row(measured, "identity", "gaussian")["bits"] == pytest.approx(32, abs=0.01)
    assert row(measured, "sign", "laplacian")["bits"] == pytest.approx(1, abs=0.02)


def test_codecs_are_told_the_layers() -> None:
    x = gradients.saved_gradients()["mlp late"]
    layout = codecs.spec_of("mlp late", x).layout
    assert layout[0] == ("1.weight", 0, 128 * 64, (128, 64))
    assert layout[-1][2] == x.numel()
    assert codecs.spec_of("gaussian", torch.zeros(12)).layout == (("", 0, 12, (3, 4)),)


def test_known_errors(measured) -> None:
    # C(x) = mean|x| sign(x) keeps (E|x|)^2 / E x^2 of the energy: 2/pi and 1/2.
    for kind, kept in (("gaussian", 2 / math.pi), ("laplacian", 1 / 2)):
        assert row(measured, "sign", kind)["nmse"] == pytest.approx(1 - kept, abs=0.02)
        assert row(measured, "sign", kind)["cosine"] == pytest.approx(math.sqrt(kept), abs=0.02)
        assert row(measured, "identity", kind)["nmse"] == 0
    # What top-k keeps is what `facts` says about the vector.
    for name, told in measured["inputs"].items():
        nmse = row(measured, "topk(0.01)", name)["nmse"]
        assert nmse == pytest.approx(1 - told["top1"], abs=0.01)
        assert row(measured, "topk(0.01)", name)["cosine"] == pytest.approx(
            math.sqrt(1 - nmse), rel=1e-5
        )


def test_the_drawn_vectors_are_what_they_are_called(measured) -> None:
    assert measured["inputs"]["gaussian"]["kurtosis"] == pytest.approx(3, abs=0.2)
    assert measured["inputs"]["laplacian"]["kurtosis"] == pytest.approx(6, abs=1)


def test_the_saved_gradients_are_summed_up(measured) -> None:
    single = [row(measured, "sign", name) for name in gradients.saved_gradients()]
    summed = row(measured, "sign", codecs.REAL)
    assert summed["numel"] == sum(r["numel"] for r in single)
    assert summed["nmse"] == pytest.approx(sum(r["nmse"] for r in single) / len(single))
    assert min(r["bits"] for r in single) <= summed["bits"] <= max(r["bits"] for r in single)


def test_reducers_are_measured_in_a_group(measured) -> None:
    exact, topk = measured["reducers"]
    # A direct all-reduce of four sends 2 * 3/4 of the vector.
    assert exact["bits"] == 48
    assert exact["nmse_first"] < 1e-12
    assert exact["cosine_all"] == pytest.approx(1)
    assert topk["nmse_all"] < topk["nmse_first"]  # feedback brings the rest


def test_saved_gradients_are_real_and_small() -> None:
    assert gradients.FILE.stat().st_size < 1.5e6
    saved, told = gradients.saved_gradients(), gradients.saved_facts()
    assert saved.keys() == told.keys()
    assert {name.split()[0] for name in saved} == {"mlp", "mnist_cnn", "char_lstm", "nanogpt"}
    for name, x in saved.items():
        assert x.dtype == torch.float32
        assert torch.isfinite(x).all()
        assert x.numel() == sum(math.prod(shape) for shape in told[name]["layers"].values())
        for fact, value in gradients.facts(x).items():
            assert told[name][fact] == pytest.approx(value, rel=1e-6)
        assert told[name]["kurtosis"] > 6  # heavier tails than a Laplacian
    assert gradients.worker_gradients().shape[0] == 4


def test_tables_fit_eighty_columns() -> None:
    figures = {
        "numel": 1,
        "bits": 32.0123,
        "nmse": 1.23456e-05,
        "cosine": -0.99996,
        "encode_gb_per_s": 123.4,
        "decode_gb_per_s": 0.01234,
        "encode_copies": 1234.5,
        "decode_copies": 12.345,
    }
    methods = ["sign", "topk(0.01) >> qsgd(bits=4, bucket=64) >> rans"]
    rows = [
        {"method": method, "input": kind, **figures}
        for method in methods
        for kind in ("gaussian", "laplacian", codecs.REAL)
    ]
    reducer = {
        "method": "ef(topk(0.01) >> qsgd(bits=4, bucket=64) >> rans)",
        "workers": 4,
        "steps": 8,
        "numel": 16384,
        "bits": 100.0,
        "nmse_first": 1.2e-5,
        "nmse_all": 1.2e-5,
        "cosine_all": 0.5,
    }
    inputs = {name: {} for name in ("gaussian", "laplacian", "a", "b")}
    measured = {"numel": 4_194_304, "inputs": inputs, "codecs": rows, "reducers": [reducer]}
    console = Console(width=80, file=io.StringIO())
    for table in codecs.codecs_tables(measured):
        console.print(table)
    printed = console.file.getvalue()
    assert max(map(len, printed.splitlines())) <= 80
    assert "…" not in printed
    assert printed.count("-0.9999") + printed.count("-1.0000") == 6
    assert printed.count("1.2e-05") == 6 + 2
    assert printed.count("12.3") == 6


def test_the_command_prints_json_or_tables_and_progress_apart(capsys) -> None:
    main(["codecs", "--only", "sign", "ef", "--numel", "1000", "--json"])
    printed = capsys.readouterr()
    told = json.loads(printed.out)
    assert {r["method"] for r in told["codecs"]} == {"sign"}
    assert [r["method"] for r in told["reducers"]] == ["ef(topk(0.01))"]
    assert "1/2 sign" in printed.err
    main(["codecs", "--only", "sign", "--numel", "1000"])
    assert "Laplacian, 1,000 elements" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--only", "topkk"], "Did you mean topk"), (["--numel", "0"], "numel must lie in 1")],
)
def test_mistakes_are_told(arguments, message, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["codecs", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", COMPRESSION.builtin_names())
def test_every_method_is_described_where_it_is_written(name) -> None:
    cls = COMPRESSION[name]
    *what, when = (sys.modules[cls.__module__].__doc__ or "").strip().split("\n\n")
    assert what, f"{cls.__module__} must say what {name} does"
    assert re.fullmatch(r"Use it\W.+\.", when, flags=re.DOTALL), (
        f'{cls.__module__} must say at its end when to use {name}, in a paragraph "Use it ..."'
    )
    assert cls.summary()


def listed() -> list[str]:
    return re.findall(r"^### (\w+)$", PAGE.read_text(), flags=re.MULTILINE)


def test_the_page_lists_methods_that_exist() -> None:
    assert set(listed()) <= set(COMPRESSION.builtin_names())
    assert len(listed()) > 50


@pytest.mark.slow
def test_the_page_lists_every_method() -> None:
    """Not in the quick run: a new method needs no page to be tested."""
    assert sorted(listed()) == COMPRESSION.builtin_names(), "out of date: run make docs"
