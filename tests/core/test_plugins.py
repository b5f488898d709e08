"""Classes that plugins and scripts add: found, refused with both origins, or left out by name."""

import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

import gradwire
from gradwire import data
from gradwire.core.codec import Compression
from gradwire.core.errors import GradwireWarning, NotationError
from gradwire.core.notation import Expression
from gradwire.core.registry import Registry
from gradwire.data import Dataset
from gradwire.experiment.run.registries import REGISTRIES

CODEC = """
from dataclasses import dataclass
from gradwire.compression.identity import Identity
from gradwire.core.codec import Codec

@dataclass(frozen=True, repr=False)
class {name}(Codec):
    "An example."
    guarantee = Identity.guarantee
    values_spec = Identity.values_spec
    split = Identity.split
    join = Identity.join
"""
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path, monkeypatch) -> Iterator[Install]:
    """Puts packages with entry points on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def put(package: str, group: str, entries: dict[str, str], files: dict[str, str]) -> None:
        root = tmp_path / package
        for name, text in {"__init__.py": "", **files}.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        metadata = tmp_path / f"{package}-1.2.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n"
        )
        lines = [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
        (metadata / "entry_points.txt").write_text("\n".join(lines))

    yield put
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def compressions() -> Registry[Compression]:
    """A registry that has not looked for plugins yet."""
    return Registry(
        "compression", Compression, "gradwire.compression", group="gradwire.compression"
    )


def test_a_class_of_a_plugin_is_found_where_all_others_are(install) -> None:
    install(
        "mine",
        "gradwire.compression",
        {"mine": "mine.copied:Copied"},
        {"copied.py": CODEC.format(name="Copied")},
    )
    registry = compressions()
    assert repr(registry.parse("copied >> fp16")) == "copied >> fp16"
    assert "copied" in registry.names()
    assert "copied" not in registry.builtin_names()
    assert registry.origin("copied") == "mine = mine.copied:Copied of mine 1.2"
    assert registry.origin("topk") == ""


def test_all_classes_of_a_package_that_an_entry_point_names(install) -> None:
    files = {"one.py": CODEC.format(name="One"), "inner/__init__.py": "", "_hidden.py": "1 / 0"}
    files["inner/two.py"] = CODEC.format(name="Two")
    install("several", "gradwire.compression", {"several": "several"}, files)
    registry = compressions()
    assert {"one", "two"} == set(registry.names()) - set(registry.builtin_names())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("wrong.absent:Absent", "cannot be imported: ModuleNotFoundError: No module named"),
        ("wrong.broken:Broken", "cannot be imported: ZeroDivisionError: division by zero"),
        ("wrong.number:NUMBER", "is no compression: expected a class derived from Compression"),
        ("wrong.number", "has no compression: no finished Compression"),
        ("wrong.topk:TopK", "'topk' is gradwire.compression.sparsification.topk.TopK. Give its"),
    ],
)
def test_a_plugin_that_does_not_work_is_left_out_by_name(install, value, message) -> None:
    files = {
        "broken.py": "1 / 0",
        "number.py": "NUMBER = 3",
        "topk.py": CODEC.format(name="TopK"),
    }
    install("wrong", "gradwire.compression", {"mine": value}, files)
    registry = compressions()
    with pytest.warns(GradwireWarning) as warned:
        names = registry.names()
    (warning,) = warned
    assert f"plugin mine = {value} of wrong 1.2 is left out: it " in str(warning.message)
    assert message in str(warning.message)
    assert names == registry.builtin_names()
    assert registry["topk"].__module__ == "gradwire.compression.sparsification.topk"


def test_of_two_plugins_with_one_name_both_are_reported(install) -> None:
    for package in ("first", "second"):
        files = {"copied.py": CODEC.format(name="Copied")}
        entries = {package: f"{package}.copied:Copied"}
        install(package, "gradwire.compression", entries, files)
    with pytest.warns(GradwireWarning, match="second 1.2 is left out.* is first = .* of first 1.2"):
        assert compressions()["copied"].__module__ == "first.copied"


def test_help_and_wrong_arguments_import_no_plugin(install, capsys) -> None:
    from gradwire.cli.front import run

    install("broken", "gradwire.compression", {"broken": "broken.it:It"}, {"it.py": "1 / 0"})
    for arguments in (["--help"], ["run", "--help"], ["run", "--steps", "x"]):
        with pytest.raises(SystemExit):
            run(arguments)
    assert "broken" not in sys.modules


@dataclass(frozen=True, repr=False)
class Toy(Expression):
    """A toy."""


@pytest.fixture
def toys(monkeypatch) -> Registry[Toy]:
    registry = Registry("toy", Toy, __name__)
    monkeypatch.setitem(REGISTRIES, "toy", registry)
    return registry


def test_register_adds_a_class_and_returns_it(toys) -> None:
    @gradwire.register
    @dataclass(frozen=True, repr=False)
    class Ball(Toy):
        radius: float = 1.0

    assert toys.parse("ball(2.0)") == Ball(2.0)
    first = Ball

    @gradwire.register  # the same place: a cell of a notebook that runs again
    @dataclass(frozen=True, repr=False)
    class Ball(Toy):
        """Another version."""

    assert toys["ball"] is Ball is not first
    assert toys.builtin_names() == ["toy"]


def test_register_refuses_a_name_with_both_origins(toys) -> None:
    def other() -> type:
        @dataclass(frozen=True, repr=False)
        class Toy(globals()["Toy"]):  # type: ignore[misc]
            pass

        return Toy

    with pytest.raises(ValueError, match=r"<locals>.Toy .* exists already: .*test_plugins.Toy"):
        gradwire.register(other())


def test_register_refuses_what_is_nothing_of_ours() -> None:
    with pytest.raises(ValueError, match="int can be registered as nothing: derive it from one of"):
        gradwire.register(int)
    with pytest.raises(NotationError, match="unknown compression 'int'"):
        REGISTRIES["compression"].parse("int")


@pytest.fixture
def _fresh_data() -> Iterator[None]:
    data._loaders.cache_clear()
    data.load.cache_clear()
    yield
    data._loaders.cache_clear()
    data.load.cache_clear()


def dots() -> Dataset:
    x = torch.zeros(4, 2, dtype=torch.uint8)
    return Dataset("dots", "text", x, x, x, x, num_classes=2)


@pytest.mark.usefixtures("_fresh_data")
def test_data_sets_of_scripts_and_plugins(install) -> None:
    text = """
        import torch
        from gradwire.data import Dataset

        def load():
            x = torch.zeros(4, 2, dtype=torch.uint8)
            return Dataset("{name}", "text", x, x, x, x, num_classes=2)
    """
    files = {"lines.py": text.format(name="lines"), "digits.py": text.format(name="digits")}
    entries = {"lines": "drawn.lines", "digits": "drawn.digits:load", "none": "drawn"}
    install("drawn", "gradwire.data", entries, files)
    with pytest.warns(GradwireWarning) as warned:
        assert data.load("lines").name == "lines"
    messages = sorted(str(warning.message) for warning in warned)
    assert "'digits' is gradwire.data.digits.load" in messages[0]
    assert "expected a function, or a module with load()" in messages[1]
    gradwire.register(dots)
    assert data.load("dots").num_classes == 2
    assert {"dots", "lines", "digits"} <= set(data.names())

    def digits() -> Dataset:
        return dots()

    with pytest.raises(ValueError, match=r"exists already: data set 'digits' is gradwire\.data"):
        gradwire.register(digits)
