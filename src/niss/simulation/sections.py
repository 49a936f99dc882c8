"""The sections of a simulation's settings, each frozen and checked by itself.

`niss.simulation.config` puts them together; `niss.simulation.config_checks` says what does not go together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from niss.accounting import RELATIONS
from niss.accounting.plans import UNITS
from niss.data.catalog import find_spec
from niss.graph import GRAPHS
from niss.mechanism import MECHANISMS
from niss.mechanism.adaptive import RATE
from niss.methods import DISTORTIONS, METHODS, Distortion, Method
from niss.simulation.sampling import Sampling
from niss.simulation.server import OptimizerName, ServerRateSchedule

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(gt=0, lt=1)]

# One of the names that the package knows: whatever is registered can be chosen. A type checker sees text.
if TYPE_CHECKING:
    MethodName = str
    DistortionName = str
    GraphName = str
    MechanismName = str
    UnitName = str
    RelationName = str
else:
    MethodName = Literal[tuple(METHODS)]
    DistortionName = Literal[tuple(DISTORTIONS)]
    GraphName = Literal[tuple(GRAPHS)]
    MechanismName = Literal[tuple(MECHANISMS)]
    UnitName = Literal[tuple(UNITS)]
    RelationName = Literal[tuple(RELATIONS)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


class DataConfig(Section):
    """Which data, and how it is dealt out to the clients.

    dataset             A name from `niss data list`; not used with datasets of your own.
    split               How samples are dealt out: at random, sorted by label in shards, by Dirichlet proportions, or
                        `natural`, to the clients they come from. Left out: `natural` where the dataset has such
                        clients, else `iid`.
    clients             Number of clients. Left out: those of the dataset, or 1000 where it has none. Fewer than those
                        of a `natural` split are drawn at random.
    samples_per_client  Samples of each client, with `natural` the most that one has; none: all samples are dealt out.
                        Not with `dirichlet`.
    shards_per_client   Shards of each client with `split = "shards"`.
    alpha               Concentration of `split = "dirichlet"`: small gives a class to few clients.
    """

    dataset: str = "mnist-mini"
    split: Literal["iid", "shards", "dirichlet", "natural"] = "iid"
    clients: Count = 1000
    samples_per_client: Count | None = None
    shards_per_client: Count = 2
    alpha: Positive = 0.5

    @model_validator(mode="after")
    def _as_in_the_dataset(self) -> Self:
        """Fill in what was left out; it does not count as set, so that another dataset may fill in its own."""
        left_out = self.left_out
        spec = find_spec(self.dataset)
        if spec is not None and spec.clients is not None:
            self.__dict__.update(
                {name: {"split": "natural", "clients": spec.clients}[name] for name in left_out}
            )
        return self

    @property
    def left_out(self) -> set[str]:
        """The settings that were not made and that a dataset with clients of its own fills in."""
        return {"split", "clients"} - self.model_fields_set


class ModelConfig(Section):
    """Which model, and its sizes; a model refuses data of another kind, and sizes that it does not have.

    name       For images `mlp`, `cnn`, `resnet` or `logistic`; for sequences of tokens `gru`, `lstm` or
               `transformer`.
    hidden     Layer widths of `mlp`; none: 200 and 200. An empty list is logistic regression.
    width      Units of `gru` and `lstm` (none: 128), width of `transformer` (64), channels in the first stage of
               `resnet`, a multiple of 4 (16).
    layers     Layers of `gru` and `lstm` (none: 1) and of `transformer` (2); blocks in each of the three stages
               of `resnet` (2).
    heads      Attention heads of `transformer`, a divisor of its width; none: 4.
    embedding  Numbers that stand for a token in `gru` and `lstm`; none: 16.
    """

    name: Literal["mlp", "cnn", "resnet", "logistic", "gru", "lstm", "transformer"] = "mlp"
    hidden: tuple[Count, ...] | None = None
    width: Count | None = None
    layers: Count | None = None
    heads: Count | None = None
    embedding: Count | None = None


class TrainingConfig(Section):
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
    server_optimizer  What the server makes of that average: `sgd` moves along it (FedAvg), `momentum` is FedAvgM,
                   `adam` FedAdam, `yogi` FedYogi. No cost in privacy.
    server_momentum  Of `momentum`, and beta1 of `adam` and `yogi`; none: 0.9.
    server_beta2   How slowly the second moments of `adam` and `yogi` change; none: 0.99.
    server_epsilon  Added to their square root (tau in the paper), and what they start from; none: 0.001.
    server_rate_schedule  `constant`, or falling to zero after the last round: `linear`, or as a `cosine`.
    weights        `equal`, or `declared`: in proportion to dataset sizes, which must be public.
    size_cap       Largest size that counts with `weights = "declared"`.
    engine         `cohort`: all clients of a round together. `plain`: one after another, the reference.
    device         `auto` takes a GPU where there is one. `cuda:all`: a process on each GPU of this machine.
    workers        Processes of the cohort engine on CPUs, this one among them; none: as many as pay off.
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
    server_optimizer: OptimizerName = "sgd"
    server_momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    server_beta2: Annotated[float, Field(ge=0, lt=1)] | None = None
    server_epsilon: Positive | None = None
    server_rate_schedule: ServerRateSchedule = "constant"
    weights: Literal["equal", "declared"] = "equal"
    size_cap: Count | None = None
    engine: Literal["cohort", "plain"] = "cohort"
    device: Literal["auto", "cpu", "cuda", "cuda:all"] = "auto"
    workers: Count | None = None
    tf32: bool = False
    threads: Count = 1


class PrivacyConfig(Section):
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


class MethodConfig(Section):
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


class ProtocolConfig(Section):
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
