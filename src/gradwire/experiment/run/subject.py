"""What is trained, and on what: by names of this package, or a user's own."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from gradwire import data
from gradwire.core.errors import GradwireWarning, NotationError
from gradwire.core.generators import seeded
from gradwire.core.key import Key
from gradwire.core.notation import unknown_name
from gradwire.data.dataset import Dataset
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.given import Given
from gradwire.experiment.run.registries import MODELS
from gradwire.models.base import build_seeded
from gradwire.own.data import OwnData
from gradwire.own.fingerprint import fingerprint_module
from gradwire.own.network import build_module
from gradwire.own.objective import LOSSES, METRICS, OwnObjective, is_class_target
from gradwire.own.reference import Reference, parse_reference
from gradwire.training.evaluation import Arithmetic
from gradwire.training.evaluation.compiling import pays_to_compile
from gradwire.training.gradient import Batch
from gradwire.training.objective import Objective
from gradwire.training.task import Task
from gradwire.training.trial import Trial, try_module

_NUM_TRIED = 2  # workers, and steps of each, on whose batches a user's own module is tried
_DATA_SEED = 0  # of what draws its data: another seed of a run does not change the data


@dataclass(frozen=True)
class Subject:
    """A network with its loss, and its data."""

    model: Objective
    module: nn.Module
    dataset: Dataset | OwnData
    texts: dict[str, str]  # the settings that name them, complete
    is_own: bool = False  # whether the module is a user's own


def default_model(dataset: Dataset) -> str:
    """The usual network for data of this kind."""
    if dataset.kind == "text":
        return "char_lstm"
    channels, height, _ = dataset.input_shape
    if channels == 3:
        return "resnet20"
    return "mnist_cnn" if height == 28 else "mlp"


def find_subject(config: Config, given: Given) -> Subject:
    """Looks up, imports or takes over what the configuration names."""
    dataset, texts = _find_data(config, given)
    reference = parse_reference(config.model)
    if reference is not None:
        return _own_subject(config, given, reference, dataset, texts)
    for name in ("loss", "metric"):
        if getattr(config, name):
            raise ValueError(
                f"{name} = {getattr(config, name)!r} is for a model of your own; "
                f"{config.model or 'the usual model'} has its own {name}: leave it out"
            )
    if isinstance(dataset, OwnData) and not config.model:
        raise ValueError(
            f"data = {dataset.name} is your own: say which model to train, model=module or "
            "model=mlp((64,)), on the command line --model MODULE:NAME"
        )
    if config.model.isidentifier() and config.model not in MODELS:
        message = unknown_name("model", config.model, MODELS.names())
        raise NotationError(f"{message} A model of your own is MODULE:NAME, my_file:make_model.")
    model = MODELS.parse(config.model or default_model(_ours(dataset)))
    module = build_seeded(model, dataset.input_shape, dataset.num_classes, config.seed)
    return Subject(model, module, dataset, {**texts, "model": repr(model)})


def _own_subject(
    config: Config,
    given: Given,
    reference: Reference,
    dataset: Dataset | OwnData,
    texts: dict[str, str],
) -> Subject:
    name = _name(reference)
    module = build_module(name, given.find("model", config.model), config.seed)
    found = reference._replace(fingerprint=fingerprint_module(module))
    _check_fingerprint("model", reference, found)
    # By the first example: all have targets of one type.
    _, targets = _first_batch(dataset)
    is_classes = is_class_target(targets)
    loss_text = config.loss or ("cross_entropy" if is_classes else "mse")
    metric_text = config.metric or ("accuracy" if is_classes else "loss")
    loss = _function("loss", loss_text, given, LOSSES)
    metric = loss if metric_text == "loss" else _function("metric", metric_text, given, METRICS)
    texts = {**texts, "model": str(found), "loss": loss_text, "metric": metric_text}
    return Subject(OwnObjective(name, loss, metric), module, dataset, texts, is_own=True)


def _first_batch(dataset: Dataset | OwnData) -> tuple[Any, Any]:
    """The first training example, as a batch."""
    index = torch.tensor([0])
    if isinstance(dataset, OwnData):
        return dataset.batch(index, Key(0))
    return dataset.inputs(index), dataset.targets(index)


def _find_data(config: Config, given: Given) -> tuple[Dataset | OwnData, dict[str, str]]:
    reference = parse_reference(config.data)
    if reference is None:
        if config.collate:
            raise ValueError(
                f"collate = {config.collate!r} is for data of your own; {config.data} needs none"
            )
        return data.load(config.data), {}
    name, found = _name(reference), _make_data(config, given)
    collate = _function("collate", config.collate, given, {}) if config.collate else None
    dataset = OwnData(name, found, collate)
    complete = reference._replace(fingerprint=dataset.fingerprint())
    _check_fingerprint("data", reference, complete)
    return dataset, {"data": str(complete)}


def with_data(given: Given, configs: Sequence[Config]) -> Given:
    """With the data of these configurations made, if that is the same for all: only once."""
    texts = {config.data for config in configs}
    if len(texts) > 1 or parse_reference(configs[0].data) is None:
        return given
    return replace(given, data=_make_data(configs[0], given))


def _make_data(config: Config, given: Given) -> Any:
    """A pair (train, test), if all is well."""
    found = given.find("data", config.data)
    if not callable(found) or hasattr(found, "__getitem__"):
        return found
    try:
        with seeded(_DATA_SEED):
            return found()
    except Exception as error:
        raise ValueError(
            f"data = {config.data}: making the data failed: {type(error).__name__}: {error}. "
            "Expected a function without arguments that returns (train, test)."
        ) from error


def _function(
    setting: str, text: str, given: Given, named: dict[str, Callable[[Any, Any], Any]]
) -> Callable[..., Any]:
    if text in named:
        return named[text]
    if parse_reference(text) is None:
        names = ", ".join([*named, *(["loss"] if setting == "metric" else [])])
        known = f"one of {names}, or " if names else ""
        raise ValueError(
            f"{setting} = {text!r} is unknown: expected {known}MODULE:NAME of a function, or from "
            "Python the function itself"
        )
    found = given.find(setting, text)
    if not callable(found):
        raise ValueError(f"{setting} = {text} must be a function, got {found!r}")
    function: Callable[..., Any] = found
    return function


def _check_fingerprint(setting: str, expected: Reference, found: Reference) -> None:
    if expected.fingerprint and expected.fingerprint != found.fingerprint:
        what = "structure and initial parameters" if setting == "model" else "type and examples"
        raise ValueError(
            f"{setting} = {expected} is not what is there now, {found}: its {what} differ. Put it "
            f"back as it was, or start a new run with {setting} = {_name(expected)}."
        )


def _name(reference: Reference) -> str:
    return str(reference._replace(fingerprint=""))


def _ours(dataset: Dataset | OwnData) -> Dataset:
    assert isinstance(dataset, Dataset)
    return dataset


def make_task(
    config: Config,
    subject: Subject,
    device: torch.device,
    batch: Callable[[int, int], Batch],
    num_examples: int,
) -> Trial:
    """The task, for a run over so many examples; a module of a user's own is tried first."""
    arithmetic = Arithmetic(config.tf32, config.channels_last)
    if not subject.is_own:
        numel = sum(each.numel() for each in subject.module.parameters())
        wanted = config.compile == "always" or (
            config.compile == "auto" and pays_to_compile(numel, num_examples)
        )
        compiles = wanted and device.type == "cuda"
        return Trial(
            Task(
                subject.model,
                subject.module,
                device,
                config.evaluation,
                compiles,
                arithmetic=arithmetic,
            )
        )
    ranks, steps = range(min(_NUM_TRIED, config.workers)), range(_NUM_TRIED)
    batches = [batch(rank, step) for step in steps for rank in ranks]
    mode, source = config.evaluation, subject.dataset.name
    if not isinstance(subject.dataset, OwnData):
        source += " (your own data are data=(train, test), or --data MODULE:NAME)"
    trial = try_module(subject.model, subject.module, device, mode, batches, source, arithmetic)
    if trial.is_unable:
        warnings.warn(
            f"the gradients of {subject.model!r} are evaluated one worker after another: "
            f"{trial.reason}",
            GradwireWarning,
            stacklevel=3,
        )
    return trial
