"""The settings of a simulation: frozen, checked before any work starts, read from TOML.

Unknown keys are refused with the nearest valid name. The defaults are those of the demo: many clients
with little data each and hundreds of participants a round, where client-level privacy is affordable.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, ValidationError, model_validator

from niss.accounting import Plan
from niss.accounting.plan_noise import cheapest_kappa
from niss.errors import ConfigError
from niss.methods import enough_uploads
from niss.protocol.agreement import LINKS_PER_ROUND
from niss.simulation.carrying import plan_fields
from niss.simulation.config_checks import check_consistency
from niss.simulation.config_faults import explain
from niss.simulation.sampling import Sampling, separation_of
from niss.simulation.sections import (
    Count,
    DataConfig,
    MethodConfig,
    ModelConfig,
    PrivacyConfig,
    ProtocolConfig,
    Section,
    TrainingConfig,
)
from niss.simulation.server import rate_factors

PRESETS = ("demo", "paper")
"""The settings shipped with the package."""

_PLAN_FIELDS = frozenset(field.name for field in dataclasses.fields(Plan))


class Config(Section):
    """A whole simulation: data, model, training, privacy and one or more methods; frozen, and checked when made.

    name            Name of the run, and of its folder where `--out` gives none.
    seed            Every random number of a simulated run follows from it. The real protocol draws from the
                    system.
    rounds          Rounds of training.
    evaluate_every  Test after every so many rounds, and after the last.
    exchange        `simulated`: noise from the seed. `protocol`: the real protocol, keys and all, in one
                    process.

    The sections are `data`, `model`, `training`, `privacy`, `protocol`, and a list of `methods`, at least one.
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
        check_consistency(self)
        return self

    @property
    def participations(self) -> int:
        """The rounds over which a client's target is composed, where participants are drawn as in `training`."""
        return self._composed(self.training.sampling)

    @property
    def most_participations(self) -> int:
        """The most rounds one client can take part in, likewise."""
        return self.most_participations_by(self.training.sampling)

    def _composed(self, sampling: Sampling) -> int:
        return 1 if self.privacy.scope == "round" else self.most_participations_by(sampling)

    def most_participations_by(self, sampling: Sampling) -> int:
        """The most rounds one client can take part in, with participants drawn like that."""
        if self.privacy.scope == "training" and self.privacy.participations is not None:
            return self.privacy.participations
        if sampling == "shuffled":
            cohorts = self.data.clients // self.training.participants
            return -(-self.rounds // cohorts)
        return -(-self.rounds // self.separation_by(sampling))

    def sampling_of(self, method: MethodConfig) -> Sampling:
        """How the participants of this method are drawn: as in `training`, unless its claim needs another way."""
        allowed = method.kind.samplings
        if not allowed or self.training.sampling in allowed:
            return self.training.sampling
        return cast(Sampling, allowed[0])

    def separation_by(self, sampling: Sampling) -> int:
        """How many rounds after a participation a client may take part again, with participants drawn like that."""
        return separation_of(
            sampling,
            clients=self.data.clients,
            participants=self.training.participants,
            least=self.training.separation,
        )

    def plan(self, method: MethodConfig) -> Plan:
        """The plan that protects the clients when this method runs.

        What `PrivacyConfig`, `MethodConfig` and `Plan` call by the same name is the same; the rest is said here.
        """
        record = self.privacy.unit == "record"
        # A round of the protocol may draw its graph again, and its noise lies on a grid; delta pays for both.
        redrawn = self.exchange == "protocol" and method.kind.has_protocol
        sampling, size, threshold = self.sampling_of(method), self.training.participants, method.threshold
        carried = plan_fields(self, method, sampling) if method.kind.carries else {}
        if threshold is None and method.kind.uses("threshold"):
            threshold = enough_uploads(size, self.protocol.dropout)
        plan = Plan(
            **_plan_fields(self.privacy)
            | _plan_fields(method)
            | {
                "method": method.name,
                "participations": self._composed(sampling),
                "learning_rate": self.training.learning_rate if record else None,
                "tau2": None if method.tau2 == "calibrated" else method.tau2,
                "kappa": 1.0 if method.kappa == "planned" else method.kappa,
                "attempts": LINKS_PER_ROUND if redrawn and not method.kind.carries else 1,
                "on_grid": redrawn,
                "factors": rate_factors(self.training.server_rate_schedule, self.rounds),
                "horizon": self.rounds if method.kind.whole_run else None,
                "separation": self.separation_by(sampling),
                "sampling_probability": size / self.data.clients if sampling == "poisson" else 1.0,
                "threshold": threshold,
            }
            | carried
        )
        if method.kappa != "planned" or not method.kind.uses("kappa"):
            return plan
        return dataclasses.replace(
            plan, kappa=cheapest_kappa(plan, size, dropout=self.protocol.dropout, mode=self.protocol.mode)
        )

    def with_plan(self, plan: Plan) -> Config:
        """These settings with the protection of `plan`, for example the planner's, as their one method."""
        values = dataclasses.asdict(plan)
        privacy = {name: values[name] for name in PrivacyConfig.model_fields if name in values}
        privacy |= self.privacy.model_dump(include={"quantile", "first_clip", "clip_rate"}, exclude_none=True)
        method = {name: values[name] for name in MethodConfig.model_fields if name in values}
        method |= {"name": plan.method, "tau2": "calibrated" if plan.tau2 is None else plan.tau2}
        settings = self.model_dump(mode="json", exclude_none=True)
        return make_config({**settings, "privacy": privacy, "methods": [method]})


def _plan_fields(section: Section) -> dict[str, Any]:
    """The settings of a section that are fields of a `Plan` too."""
    return {name: getattr(section, name) for name in type(section).model_fields if name in _PLAN_FIELDS}


def make_config(values: Mapping[str, Any]) -> Config:
    """A checked `Config` from nested dictionaries, as they stand in a TOML file.

    values  sections and keys of `Config`; what is left out has its default

    Raises a `ConfigError` that names every wrong key, what is wrong with it and the nearest valid name.

    >>> niss.make_config({"rounds": 5, "privacy": {"epsilon": 2}}).privacy.epsilon
    2.0
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise explain(error, Config) from None


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
    values = config.model_dump(mode="json", exclude_none=True, exclude={"data": config.data.left_out})
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
