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
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from niss.accounting import RELATIONS, Plan
from niss.accounting.plan_noise import cheapest_kappa
from niss.accounting.plans import UNITS
from niss.errors import ConfigError
from niss.graph import GRAPHS
from niss.mechanism import MECHANISMS
from niss.mechanism.adaptive import RATE
from niss.methods import DISTORTIONS, METHODS, SHARES, Distortion, Method, enough_uploads
from niss.protocol.agreement import LINKS_PER_ROUND
from niss.simulation.carrying import plan_fields
from niss.simulation.config_checks import check_consistency
from niss.simulation.config_faults import explain
from niss.simulation.sampling import Sampling, separation_of
from niss.simulation.server_rate import ServerRateSchedule, rate_factors

PRESETS = ("demo", "paper")
"""The settings shipped with the package."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(gt=0, lt=1)]

# One of the names that the package knows: whatever is registered can be chosen. A type checker sees text.
if TYPE_CHECKING:
    MethodName = str
    DistortionName = str
    SharesName = str
    GraphName = str
    MechanismName = str
    UnitName = str
    RelationName = str
else:
    MethodName = Literal[tuple(METHODS)]
    DistortionName = Literal[tuple(DISTORTIONS)]
    SharesName = Literal[tuple(SHARES)]
    GraphName = Literal[tuple(GRAPHS)]
    MechanismName = Literal[tuple(MECHANISMS)]
    UnitName = Literal[tuple(UNITS)]
    RelationName = Literal[tuple(RELATIONS)]

_PLAN_FIELDS = frozenset(field.name for field in dataclasses.fields(Plan))


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


class DataConfig(_Section):
    """Which data, and how it is dealt out to the clients.

    dataset             A name from `niss data list`; not used with datasets of your own.
    split               How samples are dealt out: at random, sorted by label in shards, or by Dirichlet
                        proportions.
    clients             Number of clients.
    samples_per_client  Samples of each client; none: all samples are dealt out. Not with `dirichlet`.
    shards_per_client   Shards of each client with `split = "shards"`.
    alpha               Concentration of `split = "dirichlet"`: small gives a class to few clients.
    """

    dataset: str = "mnist-mini"
    split: Literal["iid", "shards", "dirichlet"] = "iid"
    clients: Count = 1000
    samples_per_client: Count | None = None
    shards_per_client: Count = 2
    alpha: Positive = 0.5


class ModelConfig(_Section):
    """Which network; `hidden` are the layer widths of the MLP.

    name    The network.
    hidden  Layer widths of the MLP; none: 200 and 200. An empty list is logistic regression.
    """

    name: Literal["mlp", "cnn"] = "mlp"
    hidden: tuple[Count, ...] | None = None


class TrainingConfig(_Section):
    """How clients are chosen and what they do with their data.

    participants   Clients in a round.
    sampling       `shuffled`: dealt out in whole cohorts, so that all take part equally often. `cyclic`: the
                   same cohorts again and again. `uniform`: a fresh random set each round. `poisson`: each
                   client on its own. A method that needs another kind draws its own participants.
    separation     Fewest rounds from one participation of a client to its next, with `cyclic` or `uniform`.
    epochs         Local epochs; the `record` unit takes 1, one step a round.
    batch_size     Local batch size.
    learning_rate  Local learning rate.
    momentum       Local momentum.
    weight_decay   Local weight decay.
    server_rate    How far the model moves along the average of the updates.
    server_rate_schedule  `constant`, or falling to zero after the last round: `linear`, or as a `cosine`.
    weights        `equal`, or `declared`: in proportion to dataset sizes, which must be public.
    size_cap       Largest size that counts with `weights = "declared"`.
    engine         `cohort`: all clients of a round together. `plain`: one after another, the reference.
    device         `auto` takes a GPU where there is one.
    workers        Worker processes of the cohort engine on CPUs; none: as many as pay off.
    tf32           Faster and coarser products on a GPU.
    threads        Threads of linear algebra.
    """

    participants: Annotated[int, Field(ge=2)] = 200
    sampling: Sampling = "shuffled"
    separation: Count | None = None
    epochs: Count = 5
    batch_size: Count = 10
    learning_rate: Positive = 0.1
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight_decay: NotNegative = 0.0
    server_rate: Positive = 1.0
    server_rate_schedule: ServerRateSchedule = "constant"
    weights: Literal["equal", "declared"] = "equal"
    size_cap: Count | None = None
    engine: Literal["cohort", "plain"] = "cohort"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    workers: Count | None = None
    tf32: bool = False
    threads: Count = 1


class PrivacyConfig(_Section):
    """What is promised to each client; see `niss.Plan` for the meaning of each name.

    unit            What is hidden: a whole `client`, one `record`; `nbafl` is the paper's heuristic and
                    promises nothing.
    relation        Neighbouring inputs of the client unit: its update becomes zero, or any other.
    clip            L2 bound on an update (`client`) or on a sample's gradient (`record`); on single entries
                    with `nbafl`.
    quantile        Let the clip of a round, at most `clip`, follow this quantile of the updates' norms, by one
                    more coordinate of every upload, charged with it; none: the same clip in all rounds.
    first_clip      Clip of the first round with `quantile`; none: a tenth of `clip`.
    clip_rate       How fast it moves: by a factor of exp(rate) a round at most.
    epsilon         The target of every client, or one for each client.
    delta           The target of every client.
    scope           `training`: the target holds over all participations. `round`: for one round alone.
    participations  Most rounds a client takes part in; none: what sampling and rounds allow.
    colluders       Participants of a round that are assumed to tell the server all they know.
    revealed        Most edges of one client that a repair may reveal.
    dropped         Most clients that a repaired round may lose.
    committee       Members that repair a round; none: all its participants.
    mechanism       `analytic` is exact. `classical` is proved for epsilon < 1 only.
    allow_invalid   Allow `classical` where it is not proved; the run then promises nothing.
    """

    unit: UnitName = "client"
    relation: RelationName = "zero-out"
    clip: Positive = 0.5
    quantile: Probability | None = None
    first_clip: Positive | None = None
    clip_rate: Positive = RATE
    epsilon: Positive | tuple[Positive, ...] = 3.0
    delta: Probability = 1e-5
    scope: Literal["training", "round"] = "training"
    participations: Count | None = None
    colluders: Annotated[int, Field(ge=0)] = 0
    revealed: Annotated[int, Field(ge=0)] = 0
    dropped: Annotated[int, Field(ge=0)] = 0
    committee: Count | None = None
    mechanism: MechanismName = "analytic"
    allow_invalid: bool = False


class MethodConfig(_Section):
    """One contestant. `tau2 = "calibrated"` takes the least distortion that keeps the joint-view target.

    name        The method.
    label       Its name in tables and folders; needed where two methods are alike.
    kappa       Strength of the shares, in units of the noise a client would need alone; `planned`: the one that
                leaves least noise in the sum.
    neighbours  Unit shares each client sends.
    graph       Who shares with whom: balanced and random, everyone, a plain random list, or within groups.
    groups      The clients of each group of a coalition graph.
    distortion  How received shares are changed: `additive` (fresh noise), or by a factor for each share
                (`scalar`, the paper's letter) or coordinate.
    tau2        Size of the distortion; `calibrated`: the least that keeps the target in the joint view.
    threshold   Fewest uploads of which `secagg-ddg` opens a sum; none: such that one round in a million is
                lost at the dropout rate of the protocol.
    bands       Bands of the square root of `central-mf`; none: the separation of the clients.
    carried_to_residual  Variance that `niss-carried` and `central-carried` carry over, in units of what stays; none:
                the best.
    carry       Carry noise from one round to the next: `niss` becomes `niss-carried`, where everyone shares with
                everyone (`graph = "complete"`) at kappa = 20 unless other values are given.
    lags        Rounds ahead to which each client of `niss-carried` carries noise; more pay for long separations.
    carried_neighbours  Unit shares that each client of `niss-carried` carries to the next round; none: to all.
    closing     One more round of `niss-carried`, without data, takes out what the last one carried.
    shares      What clients of `niss` share: `gaussian` noise, or `uniform` masks (with `protocol.mode = "repair"`).
    """

    name: MethodName = "niss"
    label: str | None = None
    kappa: Literal["planned"] | Positive = "planned"
    neighbours: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 10.0
    graph: GraphName = "regular"
    groups: tuple[tuple[int, ...], ...] = ()
    distortion: DistortionName = "additive"
    tau2: Literal["calibrated"] | NotNegative | tuple[NotNegative, ...] = "calibrated"
    threshold: Count | None = None
    bands: Count | None = None
    carried_to_residual: NotNegative | None = None
    carry: bool = False
    lags: Count = 1
    carried_neighbours: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    closing: bool = False
    shares: SharesName = "gaussian"

    @model_validator(mode="before")
    @classmethod
    def _carried(cls, values: Any) -> Any:
        """`carry` chooses the method that carries noise, which may have defaults of its own."""
        if not isinstance(values, Mapping):
            return values
        name = values.get("name", cls.model_fields["name"].default)
        kind = METHODS.get(name) if isinstance(name, str) else None
        if kind is None:
            return values
        if values.get("carry") is True and not kind.carries:
            if kind.carrying is None:
                raise ValueError(f"carry: {name} has no shares that could be carried to the next round")
            kind = METHODS[kind.carrying]
        return {**kind.defaults, **values, "name": kind.name} | ({"carry": True} if kind.carries else {})

    @property
    def title(self) -> str:
        """The name shown in tables and used for the folder of its run."""
        return self.label or self.name

    @property
    def kind(self) -> Method:
        """The method itself: which noise it adds and what that is worth."""
        return METHODS[self.name]

    @property
    def distorts(self) -> Distortion | None:
        """How received shares are distorted; None where none are received, or tau2 is 0."""
        return DISTORTIONS[self.distortion] if self.kind.uses("distortion") and self.tau2 != 0.0 else None


class ProtocolConfig(_Section):
    """How dropouts are handled, and how the real protocol is run when `exchange = "protocol"`.

    mode          What happens to the noise of clients that drop out.
    dropout       Probability with which each participant drops out of a round, in either exchange.
    grid_bits     The grid has steps of 2^-bits; none: chosen for the noise.
    modulus_bits  Bits of an uploaded number.
    """

    mode: Literal["tolerate", "repair"] = "tolerate"
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    grid_bits: Annotated[int, Field(ge=1, le=60)] | None = None
    modulus_bits: Literal[32, 64] = 64


class Config(_Section):
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


def _plan_fields(section: _Section) -> dict[str, Any]:
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
