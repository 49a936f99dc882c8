"""The settings of a simulation: frozen, checked before any work starts, read from TOML.

Unknown keys are refused with the nearest valid name. The defaults are those of the demo: many clients
with little data each and hundreds of participants a round, where client-level privacy is affordable.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from niss.accounting import Plan
from niss.errors import ConfigError
from niss.protocol.beacon import LINKS_PER_ROUND
from niss.simulation.protocol_limits import check_protocol

PRESETS = ("demo", "paper")

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(gt=0, lt=1)]


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
    """A whole simulation: data, model, training, privacy and one or more methods."""

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
        clients, training, privacy = self.data.clients, self.training, self.privacy
        if training.participants > clients:
            raise ValueError(
                f"training.participants: {training.participants} of only {clients} clients; "
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
        titles = [method.title for method in self.methods]
        for title in titles:
            if titles.count(title) > 1:
                raise ValueError(f"methods: two are called {title!r}; give each its own label")
            if not title or title in (".", "..") or any(sign in title for sign in "/\\\0"):
                raise ValueError(f"methods: {title!r} cannot be the name of a folder; give it another label")
        if self.exchange == "protocol":
            check_protocol(self)
        if privacy.colluders > training.participants - 2:
            raise ValueError(
                f"privacy.colluders: {privacy.colluders} of {training.participants} participants leave nobody "
                "to share noise with; assume fewer, or let more take part"
            )
        for method in self.methods:
            if isinstance(method.tau2, tuple) and len(method.tau2) != clients:
                raise ValueError(f"methods.tau2: {len(method.tau2)} values for {clients} clients")
            if method.tau2 == "calibrated" and method.distortion != "additive" and method.name == "niss":
                raise ValueError(
                    f"methods.tau2: only the additive distortion can be calibrated, not {method.distortion}; "
                    "give a number, or use distortion = 'additive'"
                )
            multiplied = method.name == "niss" and method.distortion != "additive" and method.tau2 != 0.0
            if multiplied and self.protocol.dropout and self.protocol.mode == "repair":
                raise ValueError(
                    f"methods.distortion: shares that a client has multiplied ({method.distortion!r}) cannot be "
                    "taken out of a sum again; use distortion = 'additive', or protocol.mode = 'tolerate'"
                )
            if method.graph == "coalition" and not method.groups:
                raise ValueError(
                    "methods.groups: a coalition graph needs them, for example [[0, 1, 2], [3, 4, 5]]"
                )
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
        """The plan that protects the clients when this method runs."""
        return Plan(
            method=method.name,
            unit=self.privacy.unit,
            relation=self.privacy.relation,
            clip=self.privacy.clip,
            epsilon=self.privacy.epsilon,
            delta=self.privacy.delta,
            participations=self.participations,
            mechanism=self.privacy.mechanism,
            allow_invalid=self.privacy.allow_invalid,
            learning_rate=self.training.learning_rate if self.privacy.unit == "record" else None,
            kappa=method.kappa,
            neighbours=method.neighbours,
            graph=method.graph,
            groups=method.groups,
            distortion=method.distortion,
            tau2=None if method.tau2 == "calibrated" else method.tau2,
            colluders=self.privacy.colluders,
            revealed=self.privacy.revealed,
            dropped=self.privacy.dropped,
            # A round of the protocol may draw its graph again; delta pays for every draw.
            attempts=LINKS_PER_ROUND if self.exchange == "protocol" and method.name == "niss" else 1,
        )

    def with_plan(self, plan: Plan) -> Config:
        """These settings with the protection of `plan`, for example the planner's, as their one method."""
        values = self.model_dump(mode="json", exclude_none=True)
        privacy = {
            "unit": plan.unit,
            "relation": plan.relation,
            "clip": plan.clip,
            "epsilon": plan.epsilon,
            "delta": plan.delta,
            "participations": plan.participations,
            "mechanism": plan.mechanism,
            "allow_invalid": plan.allow_invalid,
            "colluders": plan.colluders,
            "revealed": plan.revealed,
            "dropped": plan.dropped,
        }
        method = {
            "name": plan.method,
            "kappa": plan.kappa,
            "neighbours": plan.neighbours,
            "graph": plan.graph,
            "groups": plan.groups,
            "distortion": plan.distortion,
            "tau2": "calibrated" if plan.tau2 is None else plan.tau2,
        }
        return make_config({**values, "privacy": privacy, "methods": [method]})


def load_config(path: str | Path) -> Config:
    """Read a TOML file; every fault names the key and the fix."""
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
    """One of the settings shipped with the package: `demo` or `paper`."""
    if name not in PRESETS:
        raise ConfigError(
            f"unknown preset {name!r}", field="preset", hint="use one of: " + ", ".join(PRESETS)
        )
    text = resources.files("niss.simulation").joinpath("presets", f"{name}.toml").read_text(encoding="utf-8")
    return make_config(tomllib.loads(text))


def make_config(values: Mapping[str, Any]) -> Config:
    """A checked `Config` from nested dictionaries."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise _explain(error) from None


def with_overrides(config: Config, overrides: Mapping[str, Any]) -> Config:
    """The config with dotted keys replaced, for example `{"privacy.epsilon": 5}`, and checked again."""
    values = config.model_dump(mode="json", exclude_none=True)
    for key, value in overrides.items():
        *path, last = key.split(".")
        place: Any = values
        for step in path:
            if isinstance(place, list):
                raise ConfigError(
                    f"{step} holds a list",
                    field=key,
                    hint="change the methods in the TOML file, or use the flags",
                )
            place = place.setdefault(step, {})
        if not isinstance(place, dict):
            raise ConfigError("is not a section with settings", field=".".join(path))
        place[last] = value
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
    found = first.get("input")
    if first["type"] == "literal_error" and isinstance(found, str):
        allowed = [part for part in first["ctx"]["expected"].split("'") if part.strip(" ,or")]
        close = difflib.get_close_matches(found, allowed, n=1)
        more = f"did you mean {close[0]!r}?" if close else more
    if isinstance(found, str | int | float | bool):
        message += f" (got {found!r})"
    return ConfigError(message, field=field or None, hint=more)


def _field_name(location: tuple[int | str, ...]) -> str:
    # pydantic appends the tried type of a union in brackets or by name; the user never wrote those.
    return ".".join(str(part) for part in location if not (isinstance(part, str) and _is_type_tag(part)))


def _is_type_tag(part: str) -> bool:
    return "[" in part or part.startswith("constrained")


def _nearest(location: tuple[int | str, ...]) -> str:
    section: Any = Config
    for part in location[:-1]:
        if isinstance(part, int):
            continue
        section = {
            "data": DataConfig,
            "model": ModelConfig,
            "training": TrainingConfig,
            "privacy": PrivacyConfig,
            "protocol": ProtocolConfig,
            "methods": MethodConfig,
        }.get(part, section)
    names = sorted(section.model_fields)
    close = difflib.get_close_matches(str(location[-1]), names, n=1)
    return f"did you mean {close[0]!r}?" if close else "valid keys here: " + ", ".join(names)
