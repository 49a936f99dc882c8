"""The settings of a simulation: frozen, checked before any work starts, read from TOML.

Unknown keys are refused with the nearest valid name. The defaults are those of the demo: many clients
with little data each and hundreds of participants a round, where client-level privacy is affordable.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from niss.accounting import Plan
from niss.errors import ConfigError
from niss.protocol.beacon import LINKS_PER_ROUND

PRESETS = ("demo", "paper")
"""The settings shipped with the package."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(gt=0, lt=1)]

_PLAN_FIELDS = frozenset(field.name for field in dataclasses.fields(Plan))


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


class DataConfig(_Section):
    """Which data, and how it is dealt out to the clients."""

    dataset: str = "mnist-mini"
    split: Literal["iid", "shards", "dirichlet"] = "iid"
    clients: Count = 1000
    samples_per_client: Count | None = None
    shards_per_client: Count = 2
    alpha: Positive = 0.5


class ModelConfig(_Section):
    """Which network; `hidden` are the layer widths of the MLP."""

    name: Literal["mlp", "cnn"] = "mlp"
    hidden: tuple[Count, ...] | None = None


class TrainingConfig(_Section):
    """How clients are chosen and what they do with their data."""

    participants: Annotated[int, Field(ge=2)] = 200
    sampling: Literal["shuffled", "uniform"] = "shuffled"
    epochs: Count = 5
    batch_size: Count = 10
    learning_rate: Positive = 0.1
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight_decay: NotNegative = 0.0
    weights: Literal["equal", "declared"] = "equal"
    size_cap: Count | None = None
    engine: Literal["cohort", "plain"] = "cohort"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    workers: Count | None = None
    tf32: bool = False
    threads: Count = 1


class PrivacyConfig(_Section):
    """What is promised to each client; see `niss.Plan` for the meaning of each name."""

    unit: Literal["client", "record", "nbafl"] = "client"
    relation: Literal["zero-out", "replace-one"] = "zero-out"
    clip: Positive = 0.5
    epsilon: Positive | tuple[Positive, ...] = 3.0
    delta: Probability = 1e-5
    scope: Literal["training", "round"] = "training"
    participations: Count | None = None
    colluders: Annotated[int, Field(ge=0)] = 0
    revealed: Annotated[int, Field(ge=0)] = 0
    dropped: Annotated[int, Field(ge=0)] = 0
    mechanism: Literal["analytic", "classical"] = "analytic"
    allow_invalid: bool = False


class MethodConfig(_Section):
    """One contestant. `tau2 = "calibrated"` takes the least distortion that keeps the joint-view target."""

    name: Literal["fedavg", "dp-fedavg", "central-dp", "niss"] = "niss"
    label: str | None = None
    kappa: Positive = 1.0
    neighbours: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 10.0
    graph: Literal["regular", "complete", "random", "coalition"] = "regular"
    groups: tuple[tuple[int, ...], ...] = ()
    distortion: Literal["scalar", "coordinate", "additive"] = "additive"
    tau2: Literal["calibrated"] | NotNegative | tuple[NotNegative, ...] = "calibrated"

    @property
    def title(self) -> str:
        """The name shown in tables and used for the folder of its run."""
        return self.label or self.name


class ProtocolConfig(_Section):
    """How dropouts are handled, and how the real protocol is run when `exchange = "protocol"`."""

    mode: Literal["tolerate", "repair"] = "tolerate"
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    grid_bits: Annotated[int, Field(ge=1, le=60)] | None = None
    modulus_bits: Literal[32, 64] = 64


class Config(_Section):
    """A whole simulation: data, model, training, privacy and one or more methods; frozen, and checked when made.

    name            name of the run, and of its folder where none is given
    seed            every random number of a simulated run follows from it
    rounds          rounds of training
    evaluate_every  test after every so many rounds, and after the last
    exchange        `simulated`: noise from the seed; `protocol`: the real protocol, keys and all, in one process
    data            dataset, split, number of clients (`DataConfig`)
    model           the network (`ModelConfig`)
    training        participants of a round and their local work (`TrainingConfig`)
    privacy         what is promised to each client (`PrivacyConfig`)
    protocol        dropouts, repair and the grid (`ProtocolConfig`)
    methods         what is compared, at least one (`MethodConfig`)

    Make one with `make_config`, `load_config` or `preset`, whose errors name the key and the fix.

    >>> config = niss.make_config({"rounds": 10, "methods": [{"name": "niss", "kappa": 4}]})
    >>> config.privacy.epsilon, config.participations
    (3.0, 2)
    """

    name: str = "run"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    rounds: Count = 30
    evaluate_every: Count = 1
    exchange: Literal["simulated", "protocol"] = "simulated"
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    protocol: ProtocolConfig = ProtocolConfig()
    methods: Annotated[tuple[MethodConfig, ...], Field(min_length=1)] = (MethodConfig(),)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_training(self)
        _check_titles(self.methods)
        if self.exchange == "protocol":
            _check_protocol(self)
        if self.privacy.colluders > self.training.participants - 2:
            raise ValueError(
                f"privacy.colluders: {self.privacy.colluders} of {self.training.participants} participants leave "
                "nobody to share noise with; assume fewer, or let more take part"
            )
        for method in self.methods:
            _check_method(self, method)
        return self

    @property
    def participations(self) -> int:
        """The rounds over which a client's target is composed."""
        return 1 if self.privacy.scope == "round" else self.most_participations

    @property
    def most_participations(self) -> int:
        """The most rounds one client can take part in."""
        if self.privacy.scope == "training" and self.privacy.participations is not None:
            return self.privacy.participations
        if self.training.sampling == "shuffled":
            cohorts = self.data.clients // self.training.participants
            return -(-self.rounds // cohorts)
        return self.rounds

    def plan(self, method: MethodConfig) -> Plan:
        """The plan that protects the clients when this method runs.

        What `PrivacyConfig`, `MethodConfig` and `Plan` call by the same name is the same; the rest is said here.
        """
        record = self.privacy.unit == "record"
        # A round of the protocol may draw its graph again; delta pays for every draw.
        redrawn = self.exchange == "protocol" and method.name == "niss"
        return Plan(
            **_plan_fields(self.privacy)
            | _plan_fields(method)
            | {
                "method": method.name,
                "participations": self.participations,
                "learning_rate": self.training.learning_rate if record else None,
                "tau2": None if method.tau2 == "calibrated" else method.tau2,
                "attempts": LINKS_PER_ROUND if redrawn else 1,
            }
        )

    def with_plan(self, plan: Plan) -> Config:
        """These settings with the protection of `plan`, for example the planner's, as their one method."""
        values = dataclasses.asdict(plan)
        privacy = {name: values[name] for name in PrivacyConfig.model_fields if name in values}
        method = {name: values[name] for name in MethodConfig.model_fields if name in values}
        method |= {"name": plan.method, "tau2": "calibrated" if plan.tau2 is None else plan.tau2}
        settings = self.model_dump(mode="json", exclude_none=True)
        return make_config({**settings, "privacy": privacy, "methods": [method]})


def _plan_fields(section: _Section) -> dict[str, Any]:
    """The settings of a section that are fields of a `Plan` too."""
    return {name: getattr(section, name) for name in type(section).model_fields if name in _PLAN_FIELDS}


# Faults that no single key shows. Each check raises ValueError("field: fault; fix") for the first one.


def _check_training(config: Config) -> None:
    clients, training, privacy = config.data.clients, config.training, config.privacy
    if training.participants > clients:
        raise ValueError(
            f"training.participants: {training.participants} in a round, but there are only {clients} clients; "
            "lower it or raise data.clients"
        )
    if isinstance(privacy.epsilon, tuple) and len(privacy.epsilon) != clients:
        raise ValueError(f"privacy.epsilon: {len(privacy.epsilon)} values for {clients} clients")
    if privacy.unit == "record" and training.epochs != 1:
        raise ValueError(
            "training.epochs: the record unit takes one local step a round; set it to 1 and raise rounds"
        )
    if privacy.mechanism == "classical" and not privacy.allow_invalid:
        largest = max(privacy.epsilon) if isinstance(privacy.epsilon, tuple) else privacy.epsilon
        if largest >= 1.0:
            raise ValueError(
                f"privacy.mechanism: classical is proved only for epsilon < 1, not {largest:g}; use analytic, or "
                "allow_invalid = true to reproduce the paper without a guarantee"
            )


def _check_titles(methods: tuple[MethodConfig, ...]) -> None:
    titles = [method.title for method in methods]
    for title in titles:
        if titles.count(title) > 1:
            raise ValueError(f"methods: two are called {title!r}; give each its own label")
        if not title or title in (".", "..") or any(sign in title for sign in "/\\\0"):
            raise ValueError(f"methods: {title!r} cannot be the name of a folder; give it another label")


def _check_method(config: Config, method: MethodConfig) -> None:
    clients = config.data.clients
    if isinstance(method.tau2, tuple) and len(method.tau2) != clients:
        raise ValueError(f"methods.tau2: {len(method.tau2)} values for {clients} clients")
    if method.tau2 == "calibrated" and method.distortion != "additive" and method.name == "niss":
        raise ValueError(
            f"methods.tau2: only the additive distortion can be calibrated, not {method.distortion}; "
            "give a number, or use distortion = 'additive'"
        )
    multiplied = method.name == "niss" and method.distortion != "additive" and method.tau2 != 0.0
    if multiplied and config.protocol.dropout and config.protocol.mode == "repair":
        raise ValueError(
            f"methods.distortion: shares that a client has multiplied ({method.distortion!r}) cannot be "
            "taken out of a sum again; use distortion = 'additive', or protocol.mode = 'tolerate'"
        )
    if method.graph == "coalition" and not method.groups:
        raise ValueError("methods.groups: a coalition graph needs them, for example [[0, 1, 2], [3, 4, 5]]")


def _check_protocol(config: Config) -> None:
    """What the real protocol cannot do.

    It hides whole clients of equal weight behind one target for all, draws a balanced graph, and adds its residual
    noise instead of multiplying. A setting that asks for something else is never run as if it had not been made.
    """
    privacy, training, instead = config.privacy, config.training, "or exchange = 'simulated'"
    if privacy.unit != "client":
        raise ValueError(
            f"privacy.unit: the protocol hides whole clients, not {privacy.unit!r}; use unit = 'client', {instead}"
        )
    if training.weights != "equal":
        raise ValueError(
            f"training.weights: in the protocol all clients weigh the same; use weights = 'equal', {instead}"
        )
    sharing = [method for method in config.methods if method.name == "niss"]
    if sharing and isinstance(privacy.epsilon, tuple):
        raise ValueError(
            f"privacy.epsilon: the protocol has one target for all clients; give one number, {instead}"
        )
    for method in sharing:
        if method.graph not in ("regular", "complete"):
            raise ValueError(
                f"methods.graph: the protocol draws regular or complete graphs, not {method.graph!r}; "
                f"use graph = 'regular', {instead}"
            )
        if method.graph == "complete" and method.neighbours < training.participants - 1:
            raise ValueError(
                f"methods.neighbours: {method.neighbours:g} shares from each of {training.participants} clients do "
                f"not make a complete graph in the protocol; use neighbours = {training.participants - 1}, "
                f"graph = 'regular', {instead}"
            )
        if isinstance(method.tau2, tuple):
            raise ValueError(
                "methods.tau2: the protocol has one tau2 for all clients; give one number, 'calibrated', "
                f"{instead}"
            )
        # Where tau2 is 0 there is nothing to distort.
        if method.distortion != "additive" and method.tau2 != 0.0:
            raise ValueError(
                f"methods.distortion: the protocol adds its residual noise, {method.distortion!r} would multiply; "
                f"use distortion = 'additive', {instead}"
            )


def make_config(values: Mapping[str, Any]) -> Config:
    """A checked `Config` from nested dictionaries, as they stand in a TOML file.

    values  sections and keys of `Config`; what is left out has its default

    Raises `ConfigError` for the first fault: it names the key, what is wrong with it and the nearest valid name.

    >>> niss.make_config({"rounds": 5, "privacy": {"epsilon": 2}}).privacy.epsilon
    2.0
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise _explain(error) from None


def load_config(path: str | Path) -> Config:
    """A checked `Config` from a TOML file.

    path  the file; its keys are those of `make_config`

    Raises `ConfigError` where the file cannot be read, is not TOML, or has a fault; it names the key and the fix.

    >>> config = niss.load_config("experiment.toml")
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", hint="give the path of a TOML file"
        ) from None
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    return make_config(values)


def preset(name: str) -> Config:
    """One of the settings shipped with the package.

    name  `demo`: six methods on 1,000 clients with MNIST digits, a minute on a laptop; `paper`: the settings of the
          paper, which proves less than it says

    >>> config = niss.preset("demo")
    """
    if name not in PRESETS:
        raise ConfigError(
            f"unknown preset {name!r}", field="preset", hint="use one of: " + ", ".join(PRESETS)
        )
    text = resources.files("niss.simulation").joinpath("presets", f"{name}.toml").read_text(encoding="utf-8")
    return make_config(tomllib.loads(text))


def with_overrides(config: Config, overrides: Mapping[str, Any]) -> Config:
    """The config with dotted keys replaced, for example `{"privacy.epsilon": 5}`, and checked again."""
    values = config.model_dump(mode="json", exclude_none=True)
    for key, value in overrides.items():
        *path, last = key.split(".")
        section: Any = values
        for depth, step in enumerate(path, start=1):
            section = section.setdefault(step, {})
            if isinstance(section, list):
                raise ConfigError(
                    f"{step} is a list, and a dotted key cannot reach into it",
                    field=key,
                    hint="change the methods in the TOML file, or use the flags",
                )
            if not isinstance(section, dict):
                raise ConfigError("is not a section with settings", field=".".join(path[:depth]))
        section[last] = value
    return make_config(values)


def _explain(error: ValidationError) -> ConfigError:
    """The first fault, by the name the user wrote, and how many other settings are wrong too."""
    problems = error.errors()
    # Each choice a union offers reports a fault of its own: a number out of range is the one to tell.
    first = next(
        (one for one in problems if one["type"].startswith(("greater", "less", "finite"))), problems[0]
    )
    field = _field_name(first["loc"])
    others = {_field_name(problem["loc"]) for problem in problems}
    others = {other for other in others if not field.startswith(other)}
    more = f"{len(others)} more setting{'s are' if len(others) > 1 else ' is'} wrong" if others else None
    if first["type"] == "extra_forbidden":
        return ConfigError("unknown key", field=field, hint=_nearest(first["loc"]))
    message = str(first["msg"]).removeprefix("Value error, ")
    if not field and ": " in message:
        field, message = message.split(": ", 1)
    value = first.get("input")
    if first["type"] == "literal_error" and isinstance(value, str):
        allowed = [part for part in first["ctx"]["expected"].split("'") if part.strip(" ,or")]
        close = difflib.get_close_matches(value, allowed, n=1)
        more = f"did you mean {close[0]!r}?" if close else more
    if isinstance(value, str | int | float | bool):
        message += f" (got {value!r})"
    return ConfigError(message, field=field or None, hint=more)


def _field_name(location: tuple[int | str, ...]) -> str:
    # pydantic appends the tried type of a union in brackets or by name; the user never wrote those.
    return ".".join(str(part) for part in location if not (isinstance(part, str) and _is_type_tag(part)))


def _is_type_tag(part: str) -> bool:
    return "[" in part or part.startswith("constrained")


def _nearest(location: tuple[int | str, ...]) -> str:
    """The valid key that an unknown one may have meant, or all keys of its section."""
    section: type[BaseModel] = Config
    for part in location[:-1]:
        if part in section.model_fields:
            kind = section.model_fields[str(part)].annotation
            # A section, or a list of them.
            section = next(
                one for one in (kind, *get_args(kind)) if isinstance(one, type) and issubclass(one, BaseModel)
            )
    names = sorted(section.model_fields)
    close = difflib.get_close_matches(str(location[-1]), names, n=1)
    return f"did you mean {close[0]!r}?" if close else "valid keys here: " + ", ".join(names)
