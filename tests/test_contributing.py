"""The example of CONTRIBUTING.md, literally, as a package of somebody else."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[1] / "CONTRIBUTING.md").read_text()


def block(language: str) -> str:
    section = PAGE.partition("## Add an algorithm")[2].partition("\n## ")[0]
    (found,) = re.findall(rf"```{language}\n(.*?)```", section, flags=re.DOTALL)
    return found


def commands() -> list[str]:
    """What the page says can be done after the install."""
    (found,) = re.findall(r"After `pip install -e \.`.*?\n\n((?:    .+\n)+)", PAGE)
    return [line.strip() for line in found.splitlines()]


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """The folder of the package, as `pip install -e .` makes it known."""
    root = tmp_path_factory.mktemp("plugin")
    (root / "my_codecs").mkdir()
    (root / "my_codecs" / "__init__.py").touch()
    (root / "my_codecs" / "halves.py").write_text(block("python"))
    (root / "test_halves.py").write_text(block("py"))
    metadata = root / "my_codecs-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my_codecs\nVersion: 0.1\n")
    groups = tomllib.loads(block("toml"))["project"]["entry-points"]
    (metadata / "entry_points.txt").write_text(
        "\n".join(
            line
            for group, entries in groups.items()
            for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()))
        )
    )
    return root


def run(package: Path, line: str) -> str:
    program, *arguments = shlex.split(line)
    arguments = ["-m", "gradwire", *arguments] if program == "gradwire" else arguments
    path = os.pathsep.join(filter(None, (str(package), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=package,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


WHAT_IS_PRINTED = {
    "python -m pytest": r"1 passed",
    "gradwire list": r"halves: compression.*halves = my_codecs\.halves:Halves of my_codecs 0\.1",
    "gradwire run": r"ef\(halves >> fp16\)",
}


@pytest.mark.few
@pytest.mark.parametrize("line", commands())
def test_what_the_page_says_works(package, line) -> None:
    (pattern,) = (p for start, p in WHAT_IS_PRINTED.items() if line.startswith(start))
    assert re.search(pattern, re.sub(r"\s*\n\s*", " ", run(package, line)))


@pytest.mark.slow
def test_in_a_script_register_is_enough(package) -> None:
    script = package / "script.py"
    script.write_text(
        block("python")
        + """
import gradwire
gradwire.register(Halves)
run = gradwire.simulate(compression="ef(halves >> fp16)", steps=20, model="mlp((8,))")
whole = gradwire.simulate(steps=20, model="mlp((8,))")
assert 2 * run.bytes_sent < whole.bytes_sent
print(run.config.compression)
"""
    )
    (package / "my_codecs-0.1.dist-info").rename(package / "gone")
    try:
        assert run(package, "python script.py").strip() == "ef(halves >> fp16)"
    finally:
        (package / "gone").rename(package / "my_codecs-0.1.dist-info")
