"""The runs of a sweep: every combination of the values of its settings.

    data = "mnist"
    workers = [4, 8]
    seed = [0, 1, 2]

    [[method]]
    name = "largest 1%"
    compression = "ef(topk(0.01))"

    [[method]]
    compression = ["fp16", "ef(sign)"]

Here are 2 x 3 x (1 + 2) = 18 runs. A method is a table of settings that belong together; it
overrides those above it. Settings that are lists themselves, such as `what_if`, vary by a list of
lists.

A run is named by a hash of its settings, without those that have their defaults. So a file that
grows finds its finished runs again.
"""

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

from gradwire.experiment.run.config import Config
from gradwire.experiment.run.registries import DIMENSIONS
from gradwire.experiment.studies.compare import folder_name, label

METHOD = "method"
_NAME = "name"
_MAX_SLUG = 60  # characters
_DEFAULTS: dict[str, Any] = {each.name: each.default for each in fields(Config)}


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep."""

    config: Config
    method: str  # its name in tables
    title: str = field(default="", compare=False)  # the method, and all settings that vary

    @cached_property
    def folder(self) -> str:
        """The name of its folder: readable, and unique by its end."""
        slug = folder_name(f"{self.method}, seed {self.config.seed}")[:_MAX_SLUG]
        return f"{slug}-{self.digest}"

    @cached_property
    def digest(self) -> str:
        chosen = {n: v for n, v in vars(self.config).items() if v != _DEFAULTS[n]}
        return blake2b(repr(sorted(chosen.items())).encode(), digest_size=6).hexdigest()


def read_sweep(path: Path) -> list[PlannedRun]:
    """The runs of a file."""
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    return plan_runs(values, str(path))


def plan_runs(settings: Mapping[str, Any], source: str = "sweep") -> list[PlannedRun]:
    """The runs of these settings, each once, in the order of the lists."""
    shared = dict(settings)
    methods = shared.pop(METHOD, [{}])
    if not (isinstance(methods, list) and methods and all(isinstance(m, dict) for m in methods)):
        raise ValueError(
            f"{source}: {METHOD} is a list of tables, each written below a line [[{METHOD}]]"
        )
    planned: dict[Config, PlannedRun] = {}
    for method in methods:
        own = dict(method)
        name = own.pop(_NAME, "")
        if not isinstance(name, str):
            raise ValueError(f"{source}: the {_NAME} of a method is a string, got {name!r}")
        for config in _combinations({**shared, **own}, source):
            planned.setdefault(config, PlannedRun(config, _label(config, name, own)))
    varied = [*varied_settings(list(planned.values())), "seed"]
    return [
        replace(run, title=", ".join([run.method, *_values(run.config, varied)]))
        for run in planned.values()
    ]


def _values(config: Config, names: Sequence[str]) -> list[str]:
    """Settings in words; expressions speak for themselves."""
    found = [(name, getattr(config, name)) for name in names]
    return [f"{value}" if "(" in str(value) else f"{name} {value}" for name, value in found]


def _combinations(settings: Mapping[str, Any], source: str) -> list[Config]:
    choices = {name: _choices(name, value, source) for name, value in settings.items()}
    return [
        _canonical(Config.from_dict(dict(zip(choices, values)), source), source)
        for values in itertools.product(*choices.values())
    ]


def _choices(name: str, value: Any, source: str) -> Sequence[Any]:
    if not isinstance(value, list):
        return [value]
    is_list_itself = isinstance(_DEFAULTS.get(name), tuple)
    if is_list_itself and not any(isinstance(each, list) for each in value):
        return [value]
    if not value:
        raise ValueError(f"{source}: {name} = [] has no value, so there would be no run")
    return value


def _canonical(config: Config, source: str) -> Config:
    """With the four dimensions as their expressions write themselves.

    One thread for each run, unless the file says how many: several runs share the cores, and
    results must not depend on how many.
    """
    words: dict[str, Any] = {}
    for name, registry in DIMENSIONS.items():
        try:
            words[name] = repr(registry.parse(getattr(config, name)))
        except ValueError as error:
            raise ValueError(f"{source}: {name}: {error}") from None
    return replace(config, **words, threads=config.threads or 1)


def _label(config: Config, name: str, own: Mapping[str, Any]) -> str:
    """What a method is called: its name, with what varies in it; or what it does."""
    if not name:
        return label(config)
    varied = [n for n in DIMENSIONS if isinstance(own.get(n), list)]
    return ", ".join([name, *(getattr(config, n) for n in varied)])


def varied_settings(runs: Sequence[PlannedRun]) -> list[str]:
    """The names of the settings that are not the same in all runs, in the order of `Config`.

    Without the four dimensions, which the names of methods have, and without the seed.
    """
    hidden = {*DIMENSIONS, "seed"}
    return [
        name
        for name in _DEFAULTS
        if name not in hidden and len({getattr(run.config, name) for run in runs}) > 1
    ]
