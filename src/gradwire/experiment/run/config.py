"""An experiment is a value: what is trained, the four dimensions, the network, the seed.

Every field is a number or a string of the notation, so that the same words serve Python, a TOML
file, the command line and the records of a run.
"""

import functools
import math
import tomllib
import warnings
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from gradwire.core.notation import unknown_name
from gradwire.experiment.run.advice import (
    as_toml,
    is_section,
    no_section,
    unknown_setting,
    wrong_kind,
)
from gradwire.runtime.storage.text import has_wrong_checksum
from gradwire.warning import GradwireWarning

_MAX_THREADS = 1024
NonFinite = Literal["error", "skip"]
Evaluation = Literal["auto", "vmap", "sequential"]
Engine = Literal["simulator", "process"]
Compile = Literal["auto", "always", "never"]
TF32 = Literal["none", "convolutions", "all"]
Coding = Literal["model", "measured", "free"]
MomentumAt = Literal["auto", "before", "after"]
NONFINITE, EVALUATION = get_args(NonFinite), get_args(Evaluation)
MOMENTUM_AT, CODING = get_args(MomentumAt), get_args(Coding)
ENGINES, COMPILE, ROUNDED = get_args(Engine), get_args(Compile), get_args(TF32)
DIMENSION_NAMES = ("compression", "synchronization", "architecture", "scheduling")
_REPLACED = {
    "charge_coding": 'write coding = "measured" for true, coding = "free" for false, or leave it '
    "out to charge coding by the table of costs"
}
OWN_SETTINGS = ("device", "threads")  # which may differ between the nodes of a run


@dataclass(frozen=True)
class Config:
    """One experiment."""

    data: str = "digits"
    """Data set: digits, mnist, fashion_mnist, cifar10, shakespeare, shakespeare_roles; or your own,
    MODULE:NAME of a function that returns (train, test)."""
    model: str = ""
    """Network, such as mlp, mlp((256, 128)), resnet20; empty: the usual one for the data set; or
    your own, MODULE:NAME of a function that makes an nn.Module."""
    loss: str = ""
    """Of your own model: cross_entropy, mse, or MODULE:NAME of a function of (outputs, targets);
    empty: cross_entropy if targets are integers, else mse."""
    metric: str = ""
    """Of your own model, on the test data: accuracy, loss, or MODULE:NAME of a function of
    (outputs, targets); empty: accuracy if targets are integers, else the loss."""
    collate: str = ""
    """Of your own data: MODULE:NAME of a function from a list of examples to (inputs, targets);
    empty: that of torch."""
    optimizer: str = "sgd(0.1)"
    """sgd(lr, momentum=0.9, nesterov=True, weight_decay=...) or adam(lr, ...)."""
    schedule: str = "constant"
    """Learning rate over time: constant, step((100, 200)), cosine; all take warmup=STEPS."""
    batch_size: int = 32
    """Examples per worker and step."""
    accumulate: int = 1
    """Mini-batches per worker whose mean gradient is exchanged in a step."""
    epochs: float = 10.0
    """Passes over the data, all workers together."""
    steps: int = 0
    """Training steps; 0: as many as `epochs` needs."""
    momentum_at: MomentumAt = "auto"
    """Where momentum of sgd(...) acts: after the mean, before compression, or where it trains."""
    clip_norm: float = 0.0
    """Clip the averaged gradient to this norm, or if momentum acts before it each one to
    sqrt(workers) times that, or where servers hold the model each one to it; 0: never."""
    partition: str = "iid"
    """How examples are dealt to workers: iid, dirichlet(0.5), by_label(2), by_role."""
    augment: bool = True
    """Random crops and mirror images, for data sets that profit from them."""

    workers: int = 4
    """Number of workers."""
    compression: str = "identity"
    """What travels, such as fp16, ef(topk(0.01)), topk(0.01) >> qsgd(bits=4)."""
    synchronization: str = "bsp"
    """When workers agree, such as bsp, localsgd(8), ssp(3), asp."""
    architecture: str = "allreduce"
    """How nodes are connected, such as allreduce, ring, parameter_server(2), gossip(ring)."""
    scheduling: str = "sequential"
    """When each part travels, such as sequential, wfbp, fusion, mgwfbp, priority, dear."""
    engine: Engine = "simulator"
    """What runs it: virtual workers on a modelled network, or real processes."""
    native: bool = False
    """Real processes: float means of `allreduce` by gloo's or nccl's own all-reduce. Faster, and
    equal to the simulator's within 1e-6 instead of bit for bit."""
    record_order: bool = False
    """Real processes: record the order of events, for `gradwire run --replay`."""
    record_spans: bool = False
    """Record what each node does when, for `gradwire timeline --run`."""

    bandwidth: str = "1Gbit"
    """Of each node's network card; one value, or one per worker or per node (workers, servers,
    scheduler) separated by commas."""
    latency: str = "50us"
    """Of a message; one value, or one per worker or per node separated by commas."""
    burst: int = 0
    """Bytes that a network card passes at once after a pause, before its bandwidth holds, as `tc
    tbf` does."""
    topology: str = "switch"
    """What lies between the network cards: switch, racks(4, uplink="10Gbit"), wan(2), file(...)."""
    what_if: tuple[str, ...] = ()
    """Other bandwidths to compute the virtual time for, from the same run."""
    compute: str = "measured"
    """Time of one gradient: measured, fixed(0.01), lognormal(0.01), exponential(0.01), ..."""
    layer_times: str = "flops"
    """How that time divides among layers, where a schedule overlaps: flops, hooks, given(...)."""
    host: str = "lanes"
    """What nodes run on: lanes of their own, or cores(2, send=(5e-05, 1e-10), ...) of one machine
    that all share, where messages take processor time, too."""
    speeds: str = "1"
    """Speed of the workers relative to that; one value, or one per worker."""
    stragglers: str = "nobody"
    """nobody, sometimes(0.1, slowdown=5.0), always((0,), slowdown=2.0)."""
    faults: tuple[str, ...] = ()
    """Simulated faults: crash(2, at=1.5, rejoin=4.0), arrive(3, at=2.0), loss(0.01)."""
    heartbeat: str = "500ms"
    """How long it takes until a crash is noticed."""
    coding: Coding = "model"
    """Virtual time of coding, averaging and updating: by a table of costs, the same everywhere; as
    measured here and now; or free."""
    coding_costs: str = ""
    """File of that table, made by gradwire codecs --costs; empty: the one in the package."""
    coding_slowdown: float = 1.0
    """Factor on that time: ranks that share a machine slow each other down."""

    seed: int = 0
    """Of every random draw."""
    eval_every: int = 0
    """Steps between two evaluations; 0: ten in all."""
    nonfinite: NonFinite = "error"
    """On NaN or Inf in a gradient: stop, or drop that step (bsp: on every worker)."""
    device: str = "cpu"
    """Where gradients are evaluated: cpu, cuda."""
    evaluation: Evaluation = "auto"
    """Gradients of all workers in one batch, or one after another."""
    compile: Compile = "auto"
    """On CUDA, compile gradients (not those of your own model): auto, where the run is long enough
    to earn it back, always, or never."""
    tf32: TF32 = "convolutions"
    """On CUDA, multiply in TF32: none, convolutions (as PyTorch does), or all."""
    channels_last: bool = False
    """On CUDA, let convolutions have their channels innermost."""
    threads: int = 0
    """CPU threads of torch; 0: one for networks of up to 200,000 parameters, or else as many as
    torch takes."""

    def __post_init__(self) -> None:
        for name, least in (
            ("workers", 1),
            ("batch_size", 1),
            ("accumulate", 1),
            ("steps", 0),
            ("eval_every", 0),
            ("threads", 0),
            ("burst", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.steps == 0 and not self.epochs > 0:
            raise ValueError(f"epochs must be above 0 (or give steps), got {self.epochs}")
        for name in ("epochs", "clip_norm", "coding_slowdown"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be a finite number, got {getattr(self, name)}")
        if self.coding_slowdown <= 0:
            raise ValueError(f"coding_slowdown must be above 0, got {self.coding_slowdown}")
        if self.coding_costs and self.coding != "model":
            raise ValueError(
                f'coding_costs = {self.coding_costs!r} is for coding = "model", not '
                f'"{self.coding}": leave one of them out'
            )
        if self.clip_norm < 0:
            raise ValueError(f"clip_norm must be at least 0, got {self.clip_norm}")
        if self.threads > _MAX_THREADS:
            raise ValueError(f"threads must be at most {_MAX_THREADS}, got {self.threads}")
        if self.record_order and self.engine != "process":
            raise ValueError(
                "record_order is for real processes: a simulated run has the same order each time. "
                'Write engine = "process".'
            )
        if self.record_spans and self.what_if:
            raise ValueError("record_spans records one network: leave out what_if")
        for name, choices in (
            ("nonfinite", NONFINITE),
            ("evaluation", EVALUATION),
            ("momentum_at", MOMENTUM_AT),
            ("engine", ENGINES),
            ("coding", CODING),
            ("compile", COMPILE),
            ("tf32", ROUNDED),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(unknown_name(name, str(getattr(self, name)), list(choices)))
        for name, example in (("what_if", "10Gbit"), ("faults", "crash(2, at=1.5)")):
            if not all(isinstance(text, str) for text in getattr(self, name)):
                raise ValueError(
                    f'{name} must be strings such as "{example}", got {getattr(self, name)}'
                )

    def to_toml(self) -> str:
        return "".join(f"{name} = {as_toml(value)}\n" for name, value in asdict(self).items())

    @staticmethod
    def from_toml(path: Path) -> "Config":
        try:
            content = path.read_text()
            values = tomllib.loads(content)
        except FileNotFoundError:
            raise ValueError(f"there is no configuration file {path}") from None
        except IsADirectoryError:
            inside = path / "config.toml"
            hint = f"Write {inside}." if inside.is_file() else "Name a TOML file in it."
            raise ValueError(f"{path} is a folder, not a configuration file. {hint}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path} is not TOML: {error}") from None
        if has_wrong_checksum(content):
            warnings.warn(
                f"{path} was changed or damaged since a run wrote it: its checksum does not fit. "
                "Settings that are missing in it have their defaults. If you changed it yourself, "
                "remove the line with the checksum.",
                GradwireWarning,
                stacklevel=2,
            )
        return Config.from_dict(values, str(path))

    @staticmethod
    def from_dict(values: dict[str, Any], source: str = "configuration") -> "Config":
        for name, value in values.items():
            if name in _REPLACED:
                raise ValueError(
                    f"{source}: there is no setting {name} any more: {_REPLACED[name]}"
                )
            if is_section(value):
                raise ValueError(f"{source}: {no_section(name, value, vars(Config()))}")
        try:
            return Config(**values)
        except SettingError as error:
            raise ValueError(f"{source}: {error}") from None


class SettingError(ValueError):
    """A setting that does not exist, has another type, or contradicts another one."""


def _explain_wrong_settings(cls: type[Config]) -> None:
    """Makes `Config(...)` raise helpful messages for unknown names and wrong types."""
    generated = cls.__init__

    @functools.wraps(generated)
    def init(self: Config, *args: Any, **settings: Any) -> None:
        generated(self, *args, **_checked(settings))

    setattr(cls, "__init__", init)  # noqa: B010, mypy takes no assignment to a method


def _checked(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with the types that the fields have."""
    known = {field.name: field.default for field in fields(Config)}
    checked = {}
    for name, value in settings.items():
        if name not in known:
            raise SettingError(unknown_setting(name, list(known)))
        wanted = type(known[name])
        if wanted is float and type(value) is int:
            value = float(value)
        if wanted is tuple and isinstance(value, list):
            value = tuple(value)
        if type(value) is not wanted:
            raise SettingError(wrong_kind(name, wanted, value))
        checked[name] = value
    # Files that a run wrote, perhaps of another version, and `replace` set all or nearly all
    # settings: their `steps` was computed from `epochs`, and has precedence.
    is_by_hand = 2 * len(settings) < len(known)
    if settings.get("steps") and "epochs" in settings and is_by_hand:
        raise SettingError(
            both_lengths(f"steps = {settings['steps']}", f"epochs = {settings['epochs']}")
        )
    return checked


_explain_wrong_settings(Config)


def both_lengths(steps: str, epochs: str) -> str:
    """The message for a run whose length is given twice."""
    return f"{steps} and {epochs} both say how long to train. Leave one of them out."


def common_settings(toml: str) -> list[str]:
    """The lines of a configuration that all nodes of a run must have alike."""
    return [line for line in toml.splitlines() if line.partition(" = ")[0] not in OWN_SETTINGS]
