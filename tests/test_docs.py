"""What the documentation shows works: its Python blocks run, its commands parse."""

import re
import shlex
from pathlib import Path

import pytest
import torch

from gradwire.cli import _command
from gradwire.core.key import Key
from gradwire.core.spec import Spec

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), names)


def commands() -> list[str]:
    text = "\n".join(page.read_text() for page in PAGES)
    text = re.sub(r"\\\n\s*", " ", text)
    return sorted(set(re.findall(r"^    (gradwire [^\n#|]*)", text, flags=re.MULTILINE)))


def test_there_are_commands_to_check():
    assert len(commands()) >= 3


@pytest.mark.parametrize("line", commands())
def test_commands_parse(line):
    _command(shlex.split(line)[1:])


def test_the_example_of_a_new_codec_keeps_its_word():
    (block,) = blocks(ROOT / "CONTRIBUTING.md", "python")
    names: dict = {}
    exec(block, names)
    codec = names["Halves"]()
    for numel in (0, 1, 7, 8):
        x = torch.arange(1.0, numel + 1)
        sent = torch.zeros(numel)
        for step in (0, 1):
            payload, _ = codec.encode(x, codec.init(Spec.of(x)), Key(0).at(step))
            assert payload.parts["values"].numel() == (numel + 1) // 2
            sent += codec.decode(payload, Spec.of(x), Key(0).at(step))
        assert torch.equal(sent, x)


def test_pages_link_to_files_that_exist():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
