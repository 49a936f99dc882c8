"""Federated runs on one machine: settings, rounds, runs, comparisons, and their folders.

`round.py` is a round from top to bottom; `method_run.py` is the loop around it. Here are the settings, frozen, checked
before any work starts and read without torch; whatever trains is imported on first use. Unknown keys are refused with
the nearest valid name. The defaults are those of the demo: many clients with little data each and hundreds of
participants a round, where client-level privacy is affordable.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import field, fields, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from annotated_types import Ge, Lt, MinLen
from typing_extensions import Doc

from niss.accounting.asked import settled_mode
from niss.checks import require_one_of
from niss.errors import ConfigError
from niss.settings import Count, check, settings, to_values
from niss.simulation.sections import (
    DataConfig,
    Drawing,
    MethodConfig,
    ModelConfig,
    PrivacyConfig,
    ProtocolConfig,
    TrainingConfig,
)

if TYPE_CHECKING:
    from niss.accounting import Plan
    from niss.mechanism.clipping import AdaptiveClip
    from niss.methods import Method


PRESETS = ("demo", "silos", "paper")
"""The settings shipped with the package."""
PLAN_HINT = "write one with `niss plan ... --json > plan.json`"


@settings
class Config:
    """A whole simulation: data, model, training, privacy and one or more methods; frozen, and checked when made.

    The sections are `data`, `model`, `training`, `privacy`, `protocol`, and a list of `methods`, at least one.
    Make one with `make_config`, `load_config` or `preset`, whose errors name the key and the fix.

    >>> config = niss.make_config({"rounds": 10, "methods": [{"name": "niss", "kappa": 4}]})
    >>> config.privacy.epsilon, config.participations
    (3.0, 2)
    """

    name: Annotated[str, Doc("Name of the run, and of its folder where `--out` gives none.")] = "run"
    seed: Annotated[
        Annotated[int, Ge(0), Lt(2**63)],
        Doc(
            "Every random number of a simulated run follows from it. The real protocol draws from the system."
        ),
    ] = 1
    rounds: Annotated[Count, Doc("Rounds of training.")] = 30
    evaluate_every: Annotated[Count, Doc("Test after every so many rounds, and after the last.")] = 1
    exchange: Annotated[
        Literal["simulated", "protocol"],
        Doc("`simulated`: noise from the seed. `protocol`: the real protocol, keys and all, in one process."),
    ] = "simulated"
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)
    methods: Annotated[tuple[MethodConfig, ...], MinLen(1)] = field(default_factory=lambda: (MethodConfig(),))

    def __post_init__(self) -> None:
        from niss.simulation.config_checks import check_consistency

        check_consistency(self)

    @property
    def clients(self) -> int:
        """How many there are: as many as the settings say, else those of the dataset, else 1,000."""
        return self.data.silos or self.data.clients or self._of_the_dataset or 1000

    @property
    def participants(self) -> int:
        """How many take part in a round: as many as the settings say, else every silo, else 200."""
        return self.training.participants or self.data.silos or 200

    @property
    def split(self) -> str:
        """How samples are dealt out: as the settings say, else to the clients of the dataset, else at random."""
        return self.data.split or ("iid" if self._of_the_dataset is None else "natural")

    @property
    def _of_the_dataset(self) -> int | None:
        from niss.data.catalog import find_spec

        spec = find_spec(self.data.dataset)
        return None if spec is None else spec.clients

    @property
    def participations(self) -> int:
        """The rounds over which a client's target is composed, where participants are drawn as in `training`."""
        return self._composed(self.training.sampling)

    def _composed(self, sampling: Drawing) -> int:
        return 1 if self.privacy.scope == "round" else self.most_participations(sampling)

    def most_participations(self, sampling: Drawing) -> int:
        """The most rounds one client can take part in, with participants drawn like that."""
        if self.privacy.scope == "training" and self.privacy.participations != "planned":
            return self.privacy.participations
        if sampling == "shuffled":
            cohorts = self.clients // self.participants
            return -(-self.rounds // cohorts)
        return -(-self.rounds // self.separation_by(sampling))

    @property
    def mode(self) -> str:
        """What happens to the noise of clients that drop out; in a simulation only where the settings say so."""
        if self.privacy.mode == "planned" and not self.privacy.dropout:
            return "tolerate"
        return settled_mode(self.privacy.mode, self.privacy.unit)

    def sampling_of(self, method: MethodConfig) -> Drawing:
        """How the participants of this method are drawn: as in `training`, unless its claim needs another way."""
        allowed = method.kind.samplings
        if not allowed or self.training.sampling in allowed:
            return self.training.sampling
        return cast(Drawing, allowed[0])

    def separation_by(self, sampling: Drawing) -> int:
        """How many rounds after a participation a client may take part again, with participants drawn like that."""
        if sampling == "cyclic":
            return self.clients // self.participants
        return self.training.separation or 1 if sampling == "uniform" else 1

    def adaptive_clip(self, method: MethodConfig) -> AdaptiveClip | None:
        """How the clip follows the norms of updates when this method runs; None: it stays, or there is none."""
        from niss.mechanism.clipping import AdaptiveClip

        privacy = self.privacy
        if privacy.quantile is None or not method.kind.private:
            return None
        return AdaptiveClip(privacy.clip, privacy.quantile, privacy.first_clip, privacy.clip_rate)

    def plan(self, method: MethodConfig, records: int | None = None) -> Plan:
        """The plan that protects the clients when this method runs.

        What `PrivacyConfig`, `MethodConfig` and `Plan` call by the same name is the same; the rest is said here.
        `records` are those of all silos, once they are dealt out. Before that any number will do: noise and what one
        record can do are in proportion.
        """
        from niss.accounting import Plan
        from niss.accounting.calibration import cheapest_kappa
        from niss.protocol.keys import LINKS_PER_ROUND

        # A round of the protocol may draw its graph again; delta pays for that.
        redrawn = self.exchange == "protocol" and method.kind.has_protocol
        sampling, size = self.sampling_of(method), self.participants
        carried = {}
        if method.kind.carries:
            carried = {"participants": size, "pattern": "cyclic" if sampling == "cyclic" else "any"}
        plan = Plan(
            **_plan_fields(self.privacy)
            | _plan_fields(method)
            | {
                "method": self._with_own_settings(method),
                "participations": self._composed(sampling),
                "records": None if self.privacy.batch is None else records or self.privacy.records or 1,
                "tau2": None if method.tau2 == "calibrated" else method.tau2,
                "kappa": 1.0 if method.kappa == "planned" else method.kappa,
                "attempts": LINKS_PER_ROUND if redrawn and not method.kind.carries else 1,
                "horizon": self.rounds,
                "mode": self.mode,
                "separation": self.separation_by(sampling),
            }
            | carried
        )
        if method.kappa != "planned" or not method.kind.uses("kappa"):
            return plan
        return replace(plan, kappa=cheapest_kappa(plan, size))

    def _with_own_settings(self, method: MethodConfig) -> Method | str:
        """The method with what is a setting of its own; its name where it has none."""
        from niss.methods import enough_uploads

        kind, size = method.kind, self.participants
        own = {name: getattr(method, name) for name in kind.own if hasattr(method, name)}
        if "threshold" in own and method.threshold is None:
            own["threshold"] = enough_uploads(size, self.privacy.dropout)
        if kind.secret_draw:
            own["sampling_probability"] = size / self.clients
        return cast("Method", replace(cast("Any", kind), **own)) if own else method.name

    def with_plan(self, plan: Plan) -> Config:
        """These settings with the protection of `plan`, for example the planner's, as their one method."""
        known = {one.name for one in fields(plan)}
        privacy = {one.name: getattr(plan, one.name) for one in fields(PrivacyConfig) if one.name in known}
        privacy["mode"] = plan.settled_mode  # A simulation may have another usual one.
        method_names = {one.name for one in fields(MethodConfig)}
        method = {name: getattr(plan, name) for name in method_names & known}
        own = {name: value for name, value in plan.kind.own.items() if name in method_names}
        method |= {"name": plan.kind.name, "tau2": _tau2(plan.tau2), **own}
        return replace(
            self, privacy=replace(self.privacy, **privacy), methods=(replace(MethodConfig(), **method),)
        )


def _plan_fields(section: PrivacyConfig | MethodConfig) -> dict[str, Any]:
    """The settings of a section that are fields of a `Plan` too."""
    from niss.accounting import Plan

    known = {one.name for one in fields(Plan)}
    return {name: value for name, value in vars(section).items() if name in known}


def make_config(values: Mapping[str, Any]) -> Config:
    """A checked `Config` from nested dictionaries, as they stand in a TOML file.

    values  sections and keys of `Config`; what is left out has its default

    Raises a `ConfigError` that names every wrong key, what is wrong with it and the nearest valid name.

    >>> niss.make_config({"rounds": 5, "privacy": {"epsilon": 2}}).privacy.epsilon
    2.0
    """
    given = dict(values)
    if isinstance(methods := given.get("methods"), list | tuple):
        given["methods"] = [_with_defaults(method) for method in methods]
    return check(Config, given)


def _with_defaults(method: Any) -> Any:
    """A table of `[[methods]]` with the defaults of its method; `carry` chooses the one that carries noise."""
    from niss.methods import METHODS

    if not isinstance(method, Mapping):
        return method
    name = method.get("name", "niss")
    kind = METHODS.get(name) if isinstance(name, str) else None
    if kind is None:
        return method
    if method.get("carry") is True and not kind.carries:
        if kind.carrying is None:
            raise ConfigError(
                f"{name} has no shares that could be carried to the next round",
                field="methods.carry",
                hint="leave it out",
            )
        kind = METHODS[kind.carrying]
    return {**kind.defaults, **method, "name": kind.name} | ({"carry": True} if kind.carries else {})


def settings_of_plan(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings by dotted key, and the method, under which a simulation keeps what `niss plan --json` printed.

    There are as many clients as it takes for each to take part as often as planned, where the plan names none.
    Raises `ConfigError` for a plan that the simulator cannot run, or that lacks something.
    """
    if not isinstance(values.get("plan"), dict):
        raise ConfigError("the file holds no plan that can be run", field="--plan", hint=PLAN_HINT)
    try:
        found, method = _settings_of(values)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"the plan lacks something or is damaged: {error}", field="--plan", hint=PLAN_HINT
        ) from None
    # What is as usual need not be said.
    usual = {f"privacy.{one.name}": one.default for one in fields(PrivacyConfig)}
    usual |= {f"protocol.{one.name}": one.default for one in fields(ProtocolConfig)}
    return {key: value for key, value in found.items() if value != usual.get(key, ...)}, method


def _settings_of(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    plan, participants = values["plan"], int(values["participants"])
    carries, cyclic, often = (
        values["run"] is not None,
        plan["pattern"] == "cyclic",
        int(plan["participations"]),
    )
    rounds = int(plan["horizon"] or often)
    found: dict[str, Any] = {
        "rounds": rounds,
        **{f"privacy.{one.name}": plan[one.name] for one in fields(PrivacyConfig) if one.name in plan},
    }
    if plan["unit"] == "record":
        found["data.silos"] = participants
    else:
        clients = values["clients"] or participants * math.ceil(rounds / often)
        found |= {"data.clients": int(clients), "training.participants": participants}
    if carries or plan["unit"] == "record":
        del found["privacy.participations"]  # They follow from the rounds: of silos, or of clients in turn.
    names = ["kappa", "neighbours", "graph", "distortion"]
    if carries:
        found["training.sampling"] = "cyclic" if cyclic else "uniform"
        names = ["kappa", "graph"]
        if not cyclic:
            found["training.separation"] = int(plan["separation"])
    method = {name: plan[name] for name in names}
    return found, method | {"name": plan["method"], "tau2": _tau2(plan["tau2"])}


def _tau2(planned: Any) -> Any:
    return "calibrated" if planned is None else planned


def load_config(path: str | Path) -> Config:
    """A checked `Config` from a TOML file.

    path  the file; its keys are those of `make_config`

    Raises `ConfigError` where the file cannot be read, is not TOML, or has a fault; it names the key and the fix.

    >>> config = niss.load_config("experiment.toml")
    """
    return make_config(read_toml(path))


def read_toml(path: str | Path) -> dict[str, Any]:
    """The values in a TOML file, unchecked. `ConfigError` where it cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", hint="give the path of a TOML file"
        ) from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def preset(name: str) -> Config:
    """One of the settings shipped with the package.

    name  `demo`: six methods on 1,000 clients with MNIST digits, a minute on a laptop; `silos`: ten organisations that
          hide single images; `paper`: the settings of the paper, which proves less than it says

    >>> config = niss.preset("demo")
    """
    return make_config(read_preset(name))


def read_preset(name: str) -> dict[str, Any]:
    """The values of settings shipped with the package."""
    require_one_of(name, PRESETS, field="preset")
    return read_toml(Path(str(resources.files("niss.simulation"))) / "presets" / f"{name}.toml")


def with_overrides(config: Config, overrides: Mapping[str, Any]) -> Config:
    """The config with dotted keys replaced, for example `{"privacy.epsilon": 5}`, and checked again."""
    return make_config(override(to_values(config), overrides))


def override(values: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The values, changed in place, with dotted keys replaced."""
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
    return values
