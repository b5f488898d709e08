"""`gradwire list NAME`: everything about one algorithm, for every one that is listed."""

import json
from pathlib import Path

import pytest

import gradwire
from gradwire.cli import main
from gradwire.cli.catalogue import about
from gradwire.experiment.run.registries import REGISTRIES


def test_everything_about_one_is_printed(capsys):
    main(["list", "qsgd"])
    printed = " ".join(capsys.readouterr().out.split())
    for words in (
        "qsgd: compression",
        "Alistarh et al. 2017",
        "qsgd(bits=4)",
        "unbiased, relative variance at most",
        "gradwire/compression/quantization/qsgd.py",
        "bucket: int",
    ):
        assert words in printed


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("qsgd(bits=4)", ["qsgd"]),
        ("ef(topk(0.01))", ["ef"]),
        ("topk(0.01) >> qsgd(bits=4) >> rans", ["topk", "qsgd", "rans"]),
        (" parameter_server(2) ", ["parameter_server"]),
    ],
)
def test_an_expression_stands_for_its_names(text, names):
    assert [entry["name"] for entry in about(text)] == names


@pytest.mark.parametrize(
    ("name", "properties"),
    [
        ("topk", "biased: write ef(topk(0.01))"),
        ("adacomp", "works inside ef(...) only"),
        ("randomk", "payloads add up on the way"),
        ("rans", "encodes symbols of a finite alphabet"),
        ("ssp", "needs an architecture with push_pull"),
        ("parameter_server", "offers mean, push_pull"),
        ("ef", "a way of averaging among workers"),
        ("identity", "lossless"),
    ],
)
def test_what_it_guarantees_needs_or_offers_is_told(name, properties):
    assert any(properties in each for each in about(name)[0]["properties"])


def test_a_name_of_two_kinds_is_told_twice(capsys):
    main(["list", "ring", "--json"])
    assert [each["dimension"] for each in json.loads(capsys.readouterr().out)] == [
        "architecture",
        "graph",
    ]


def test_there_is_something_about_each():
    root = Path(gradwire.__file__).parent.parent
    for kind, registry in REGISTRIES.items():
        for name in registry.names():
            entry = next(each for each in about(name) if each["dimension"] == kind)
            assert entry["summary"]
            assert entry["about"]
            assert entry["write"].startswith(name)
            assert (root / entry["file"]).is_file()
            for example in entry["examples"]:
                registry.parse(example)
