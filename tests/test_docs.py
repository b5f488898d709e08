"""What the documentation shows works: its Python blocks run, its commands parse."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from gradwire.architecture import ARCHITECTURE
from gradwire.architecture.gossip import GOSSIP
from gradwire.architecture.graphs import GRAPHS
from gradwire.cli.front import command
from gradwire.core.key import Key
from gradwire.core.spec import Spec
from gradwire.experiment.run.registries import REGISTRIES
from gradwire.synchronization import SYNCHRONIZATION

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


def commands(pages: Sequence[Path] = PAGES) -> list[str]:
    text = "\n".join(page.read_text() for page in pages)
    text = re.sub(r"\\\n\s*", " ", text)
    return sorted(set(re.findall(r"^    (gradwire [^\n#|]*)", text, flags=re.MULTILINE)))


def test_there_are_commands_to_check():
    assert len(commands()) >= 3


@pytest.mark.parametrize("line", commands())
def test_commands_parse(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in re.findall(r"--config (\S+)", line):  # settings that a reader has made before
        (tmp_path / name).write_text('architecture = "parameter_server(2)"\n')
    command(shlex.split(line)[1:])


def test_the_example_of_a_new_codec_keeps_its_word():
    block = next(b for b in blocks(ROOT / "CONTRIBUTING.md", "python") if "class Halves" in b)
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


ALGORITHMS = ROOT / "docs" / "algorithms.md"
SECTIONS = {
    "Synchronization": SYNCHRONIZATION,
    "Architecture": ARCHITECTURE,
    "Gossip algorithms": GOSSIP,
    "Graphs": GRAPHS,
}
CALL = r"[a-z_][a-z0-9_]*\(.*\)"  # an algorithm with arguments


def headings(section: str) -> dict[str, str]:
    """What headings of a section of docs/algorithms.md write in backticks: name -> arguments."""
    text = ALGORITHMS.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^### `(\w+)(?:\((.*)\))?`$", text, flags=re.MULTILINE))


@pytest.mark.parametrize("section", SECTIONS)
def test_paragraphs_are_of_algorithms_and_their_parameters(section):
    registry = SECTIONS[section]
    found = headings(section)
    assert set(found) <= set(registry.builtin_names())
    for name, arguments in found.items():
        wanted = [field.name for field in fields(registry[name])]
        assert [a.strip() for a in arguments.split(",") if a] == wanted, name


@pytest.mark.slow
@pytest.mark.parametrize("section", SECTIONS)
def test_every_algorithm_is_on_the_page(section):
    """Not in the quick run: a new algorithm needs no page to be tested."""
    assert sorted(headings(section)) == sorted(SECTIONS[section].builtin_names())


def written() -> list[str]:
    """Algorithms with arguments in docs/algorithms.md: in backticks, in tables and in commands."""
    text = re.sub(r"^#.*", "", ALGORITHMS.read_text(), flags=re.MULTILINE)  # headings: signatures
    spans = re.findall(r"`([^`\n]+)`", text)
    for line in commands([ALGORITHMS]):
        spans += shlex.split(line)
    return sorted({span for span in spans if re.fullmatch(CALL, span)})


def test_there_is_much_to_parse():
    assert len(written()) > 30


@pytest.mark.parametrize("text", written())
def test_what_the_page_of_algorithms_writes_parses(text):
    kinds = [registry for registry in REGISTRIES.values() if text.partition("(")[0] in registry]
    assert kinds, f"{text}: no algorithm has this name"
    for registry in kinds:
        try:
            registry.parse(text)
            return
        except ValueError as error:
            reason = error
    pytest.fail(f"{text}: {reason}")


def test_the_gaps_of_graphs_are_those_of_their_matrices() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text()
    rows = re.findall(
        r"^\| `([^`]+)` \|[^|]*\| ([0-9.]+) \| ([0-9.]+) \| ([0-9.]+) \|"
        r" ([0-9.]+) \|",
        page,
        re.MULTILINE,
    )
    assert len(rows) == 8  # all but one_peer_exponential, which has none, and from_file
    for text, *gaps in rows:
        graph = GRAPHS.parse(text)
        assert gaps == [f"{graph.spectral_gap(size):.3g}" for size in (8, 16, 32, 64)], text


def test_who_goes_on_without_a_lost_worker():
    text = (ROOT / "docs" / "processes.md").read_text()
    text = re.sub(r"\s+", " ", text)
    (go_on,) = re.findall(r"that do not need all workers \((.*?)\) continue", text)
    (stop,) = re.findall(r"that need all workers \((.*?), \.\.\.\) stop", text)
    complete = {"ssp": "ssp(3)", "localsgd": "localsgd(2)", "fedavg": "fedavg(0.5)"}
    for names, pauses in [(go_on, False), (stop, True)]:
        for name in re.findall(r"`(.*?)`", names):
            assert SYNCHRONIZATION.parse(complete.get(name, name)).pauses == pauses, name
