"""Messages for settings that do not exist, are sections of a file, or have a wrong type."""

import json
from collections.abc import Sequence
from typing import Any

from gradwire.core.notation import unknown_name

_RATE = ("the learning rate is part of the optimizer", "optimizer", "sgd(0.1)")
_SERVERS = ("servers are part of the architecture", "architecture", "parameter_server(2)")
_GRAPH = ("this is part of the architecture", "architecture", "gossip(ring)")
_DENSITY = ("this is part of the compression", "compression", "ef(topk(0.01))")
_WORKERS = ("the number of workers is called workers", "workers", 4)
_DEVICE = ("an accelerator is chosen by device", "device", "cuda")
_SEED = ("a run has one seed; run it again for each other one", "seed", 3)
_PART_OF_OPTIMIZER = "this is part of the optimizer"
_ELSEWHERE: dict[str, tuple[str, str, Any]] = {  # settings of other libraries: why, name, value
    "lr": _RATE,
    "learning_rate": _RATE,
    "rate": _RATE,
    "momentum": (_PART_OF_OPTIMIZER, "optimizer", "sgd(0.1, momentum=0.9)"),
    "nesterov": (_PART_OF_OPTIMIZER, "optimizer", "sgd(0.1, momentum=0.9, nesterov=True)"),
    "weight_decay": (_PART_OF_OPTIMIZER, "optimizer", "sgd(0.1, weight_decay=0.0005)"),
    "betas": (_PART_OF_OPTIMIZER, "optimizer", "adam(0.001, beta1=0.9, beta2=0.999)"),
    "warmup": ("this is part of the schedule", "schedule", "cosine(warmup=100)"),
    "servers": _SERVERS,
    "num_servers": _SERVERS,
    "graph": _GRAPH,
    "density": _DENSITY,
    "ratio": _DENSITY,
    "topk": _DENSITY,
    "error_feedback": ("feedback is written around a codec", "compression", "ef(topk(0.01))"),
    "network": ("the network is described by bandwidth and latency", "bandwidth", "1Gbit"),
    "num_workers": _WORKERS,
    "world_size": _WORKERS,
    "nodes": _WORKERS,
    "num_epochs": ("the number of epochs is called epochs", "epochs", 10),
    "seeds": _SEED,
    "num_seeds": _SEED,
    "gpu": _DEVICE,
    "cuda": _DEVICE,
}
_EXAMPLES = {  # of settings whose default shows little
    "model": "mlp((256, 128))",
    "optimizer": "sgd(0.1, momentum=0.9)",
    "schedule": "cosine(warmup=100)",
    "compression": "ef(topk(0.01))",
    "synchronization": "localsgd(8)",
    "architecture": "parameter_server(2)",
    "what_if": ("10Gbit",),
    "faults": ("crash(2, at=1.5)",),
}
_MAY_BE_OBJECTS = ("model", "data", "loss", "metric", "collate")
_KINDS: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    bool: "true or false",
    tuple: "a list of strings",
}


def advice(name: str) -> str | None:
    """What to write instead of a setting of another library."""
    if name not in _ELSEWHERE:
        return None
    why, setting, value = _ELSEWHERE[name]
    written = json.dumps(value)
    return (
        f"{why[0].upper()}{why[1:]}: {setting} = {written}, on the command line --{setting} "
        f"{written}."
    )


def unknown_setting(name: str, known: Sequence[str]) -> str:
    """The message for a setting that does not exist."""
    where = advice(name)
    return (
        f"unknown setting {name!r}. {where}" if where else unknown_name("setting", name, [*known])
    )


def wrong_kind(name: str, wanted: type, value: Any) -> str:
    """The message for a value that is not of the type that the setting has."""
    hint = ""
    if wanted is tuple and isinstance(value, str):
        hint = f" Write {name} = {as_toml((value,))}."
    elif wanted in (int, float) and isinstance(value, str):
        hint = f" Write {name} = {value}, without quotes." * value.isdecimal()
    elif name in _MAY_BE_OBJECTS:
        return (
            f"{name} of a Config is a string, got {type(value).__name__}. Hand Python objects to "
            f"gradwire.simulate or gradwire.run, {name}=..., or write {name} = MODULE:NAME, which "
            "is imported."
        )
    return f"{name} must be {_KINDS[wanted]}, got {value!r}.{hint}"


def is_section(value: Any) -> bool:
    """Whether this is written as `[name]` or `[[name]]` in TOML."""
    several = isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)
    return isinstance(value, dict) or several


def no_section(name: str, value: Any, defaults: dict[str, Any]) -> str:
    """The message for a section, given the settings that exist with their defaults."""
    if isinstance(value, list):
        return (
            f"[[{name}]] is a list of sections, and there are none: a file describes one "
            "experiment. Write a file for each, or compare methods with gradwire compare "
            '--compression fp16 "ef(topk(0.01))".'
        )
    inside = ", ".join(each for each in value if each in defaults)
    if name in defaults:
        what = f"Write {name} = {as_toml(_EXAMPLES.get(name, defaults[name]))}."
    elif inside:
        what = f"Write {inside} without it."
    else:
        what = f"Known: {', '.join(defaults)}."
    return (
        f"[{name}] is a section, and there are none: settings stand one after another, as in "
        f'bandwidth = "1Gbit". {what}'
    )


def as_toml(value: Any) -> str:
    """The value of a setting in TOML."""
    if isinstance(value, tuple):
        return "[" + ", ".join(as_toml(item) for item in value) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)  # TOML and JSON agree on strings, ints, bools
