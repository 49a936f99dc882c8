"""The sections of a simulation's settings: type, default, range and meaning of every key, and nothing else.

`niss.simulation` puts them together, and `niss.simulation.config_checks` refuses what does not go together; what
one section alone shows is refused here. Reading this file loads nothing heavy: the command line has its flags from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Le
from typing_extensions import Doc

from niss.accounting.asked import Sharing, Target, Trust, method_names, strategy_names
from niss.errors import ConfigError
from niss.settings import Count, NotNegative, OneOf, Planned, Positive, Probability, Share, settings

if TYPE_CHECKING:
    from niss.methods import Distortion, Method

Sampling = Literal["shuffled", "uniform", "cyclic", "poisson"]
Drawing = Sampling | Literal["alone"]
"""How the participants of a method are drawn; `alone`: nobody is, one client trains by itself."""
ServerRateSchedule = Literal["constant", "linear", "cosine"]
OptimizerName = Literal["sgd", "momentum", "adam", "yogi"]

# Settings that an optimiser does not have.
_NOT_OF = {
    "sgd": ("server_momentum", "server_beta2", "server_epsilon"),
    "momentum": ("server_beta2", "server_epsilon"),
}


@settings
class DataConfig:
    """Which data, and how it is dealt out to the clients."""

    dataset: Annotated[str, Doc("A name from `niss data list`; not used with datasets of your own.")] = (
        "mnist-mini"
    )
    split: Annotated[
        Literal["iid", "shards", "dirichlet", "natural"] | None,
        Doc(
            "How samples are dealt out: at random, sorted by label in shards, by Dirichlet proportions, or `natural`, "
            "to the clients they come from; none: `natural` where the dataset has such clients, else `iid`."
        ),
    ] = None
    clients: Annotated[
        Count | None,
        Doc(
            "Number of clients; none: those of the dataset, or 1000 where it has none. Fewer than those of a `natural` "
            "split are drawn at random."
        ),
    ] = None
    silos: Annotated[
        Annotated[int, Ge(2)] | None,
        Doc(
            "Number of organisations, in place of `clients`: they are all clients there are, and take part in every "
            "round."
        ),
    ] = None
    samples_per_client: Annotated[
        Count | None,
        Doc(
            "Samples of each client, with `natural` the most that one has; none: all samples are dealt out. Not with "
            "`dirichlet`."
        ),
    ] = None
    shards_per_client: Annotated[Count, Doc('Shards of each client with `split = "shards"`.')] = 2
    alpha: Annotated[
        Positive, Doc('Concentration of `split = "dirichlet"`: small gives a class to few clients.')
    ] = 0.5
    size_ratio: Annotated[
        Annotated[float, Ge(1)],
        Doc(
            "Samples of the largest client over those of the smallest, in equal steps of proportion between them; with "
            "`iid` or `shards`."
        ),
    ] = 1.0

    def __post_init__(self) -> None:
        if self.silos is not None and self.clients is not None:
            raise ConfigError(
                f"there are {self.silos} silos, and they are the clients",
                field="clients",
                hint="leave it out, or leave out silos",
            )


@settings
class ModelConfig:
    """Which model, and its sizes; a model refuses data of another kind, and sizes that it does not have."""

    name: Annotated[
        Literal["mlp", "cnn", "resnet", "logistic", "gru", "lstm", "transformer"],
        Doc(
            "For images `mlp`, `cnn`, `resnet` or `logistic`; for sequences of tokens `gru`, `lstm` or `transformer`."
        ),
    ] = "mlp"
    hidden: Annotated[
        tuple[Count, ...] | None,
        Doc("Layer widths of `mlp`; none: 200 and 200. An empty list is logistic regression."),
    ] = None
    width: Annotated[
        Count | None,
        Doc(
            "Units of `gru` and `lstm` (none: 128), width of `transformer` (64), channels in the first stage of "
            "`resnet`, a multiple of 4 (16)."
        ),
    ] = None
    layers: Annotated[
        Count | None,
        Doc(
            "Layers of `gru` and `lstm` (none: 1) and of `transformer` (2); blocks in each of the three stages of "
            "`resnet` (2)."
        ),
    ] = None
    heads: Annotated[
        Count | None, Doc("Attention heads of `transformer`, a divisor of its width; none: 4.")
    ] = None
    embedding: Annotated[
        Count | None, Doc("Numbers that stand for a token in `gru` and `lstm`; none: 16.")
    ] = None
    activation: Annotated[
        Literal["relu", "tanh"] | None,
        Doc("Of `cnn`: `tanh` is a smaller network that suits clipped gradients of records; none: `relu`."),
    ] = None


@settings
class TrainingConfig:
    """How clients are chosen and what they do with their data."""

    participants: Annotated[
        Annotated[int, Ge(2)] | None,
        Doc("Clients that take part in a round; none: 200, or all where they are silos."),
    ] = None
    sampling: Annotated[
        Sampling,
        Doc(
            "`shuffled`: dealt out in whole cohorts, so that all take part equally often. `cyclic`: the same cohorts "
            "again and again. `uniform`: a fresh random set each round. `poisson`: each client on its own. A method "
            "that needs another kind draws its own participants."
        ),
    ] = "shuffled"
    separation: Annotated[
        Count | None,
        Doc("Fewest rounds from one participation of a client to its next, with `cyclic` or `uniform`."),
    ] = None
    late: Annotated[
        Share,
        Doc(
            "Probability with which each participant of a round is late, or fails, and so uploads a blank: "
            "nothing that it learned, under its whole noise. Nobody is lost, nothing is repaired."
        ),
    ] = 0.0
    epochs: Annotated[Count, Doc("Local epochs; the `record` unit takes 1, one step a round.")] = 5
    batch_size: Annotated[Count, Doc("Local batch size.")] = 10
    learning_rate: Annotated[Positive, Doc("Local learning rate.")] = 0.1
    momentum: Annotated[Share, Doc("Local momentum.")] = 0.0
    weight_decay: Annotated[NotNegative, Doc("Local weight decay.")] = 0.0
    server_rate: Annotated[Positive, Doc("How far the model moves along the average of the updates.")] = 1.0
    server_optimizer: Annotated[
        OptimizerName,
        Doc(
            "What the server makes of that average: `sgd` moves along it (FedAvg), `momentum` is FedAvgM, `adam` "
            "FedAdam, `yogi` FedYogi. No cost in privacy."
        ),
    ] = "sgd"
    server_momentum: Annotated[
        Share | None, Doc("Of `momentum`, and beta1 of `adam` and `yogi`; none: 0.9.")
    ] = None
    server_beta2: Annotated[
        Share | None, Doc("How slowly the second moments of `adam` and `yogi` change; none: 0.99.")
    ] = None
    server_epsilon: Annotated[
        Positive | None,
        Doc("Added to their square root (tau in the paper), and what they start from; none: 0.001."),
    ] = None
    server_rate_schedule: Annotated[
        ServerRateSchedule,
        Doc("`constant`, or falling to zero after the last round: `linear`, or as a `cosine`."),
    ] = "constant"
    weights: Annotated[
        Literal["equal", "declared"],
        Doc("`equal`, or `declared`: in proportion to dataset sizes, which must be public."),
    ] = "equal"
    size_cap: Annotated[Count | None, Doc('Largest size that counts with `weights = "declared"`.')] = None
    engine: Annotated[
        Literal["cohort", "plain"],
        Doc("`cohort`: all clients of a round together. `plain`: one after another, the reference."),
    ] = "cohort"
    device: Annotated[
        Literal["auto", "cpu", "cuda", "cuda:all"],
        Doc("`auto` takes a GPU where there is one. `cuda:all`: a process on each GPU of this machine."),
    ] = "auto"
    workers: Annotated[
        Count | None,
        Doc("Processes of the cohort engine on CPUs, this one among them; none: as many as pay off."),
    ] = None
    tf32: Annotated[bool, Doc("Faster and coarser products on a GPU.")] = False
    threads: Annotated[Count, Doc("Threads of linear algebra.")] = 1

    def __post_init__(self) -> None:
        for name in _NOT_OF.get(self.server_optimizer, ()):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"server_optimizer = {self.server_optimizer!r} has none",
                    field=name,
                    hint="leave it out, or choose another optimiser",
                )
        if self.separation is not None and self.sampling not in ("cyclic", "uniform"):
            raise ConfigError(
                f"{self.sampling} sampling may choose a client again in the next round",
                field="separation",
                hint="use sampling = 'cyclic' or 'uniform'",
            )


@settings
class PrivacyConfig(Trust, Target):
    """What is promised to each client, and against whom: the names of `niss.Plan`, and how the clip moves."""

    quantile: Annotated[
        Probability | None,
        Doc(
            "Let the clip of a round, at most `clip`, follow this quantile of the updates' norms, by one more "
            "coordinate of every upload, charged with it; none: the same clip in all rounds."
        ),
    ] = None
    first_clip: Annotated[
        Positive | None, Doc("Clip of the first round with `quantile`; none: a tenth of `clip`.")
    ] = None
    clip_rate: Annotated[Positive, Doc("How fast it moves: by a factor of exp(rate) a round at most.")] = 0.5
    scope: Annotated[
        Literal["training", "round"],
        Doc("`training`: the target holds over all participations. `round`: for one round alone."),
    ] = "training"
    participations: Annotated[
        Count | Planned, Doc("Most rounds a client takes part in; `planned`: what sampling and rounds allow.")
    ] = "planned"

    def __post_init__(self) -> None:
        largest = max(self.epsilon) if isinstance(self.epsilon, tuple) else self.epsilon
        if self.mechanism == "classical" and not self.allow_invalid and largest >= 1.0:
            raise ConfigError(
                f"classical is proved only for epsilon < 1, not {largest:g}",
                field="mechanism",
                hint="use analytic, or allow_invalid = true to reproduce the paper without a guarantee",
            )
        if self.quantile is None and self.first_clip is not None:
            raise ConfigError(
                "the clip stays as it is without a quantile", field="first_clip", hint="set clip instead"
            )
        if self.quantile is not None and self.unit != "client":
            raise ConfigError(
                f"it is one of the norms of whole updates, and with unit {self.unit!r} other things are clipped",
                field="quantile",
                hint="use unit = 'client'",
            )


@settings
class MethodConfig(Sharing):
    """A table for each contestant."""

    name: Annotated[
        str,
        OneOf(method_names),
        Doc(
            "The method: `fedavg`, `alone`, `dp-fedavg`, `central-dp`, `central-dp-sampled`, `central-mf`, "
            "`secagg-ddg`, `niss` or `niss-carried`."
        ),
    ] = "niss"
    label: Annotated[
        str | None, Doc("Its name in tables and folders; needed where two methods are alike.")
    ] = None
    kappa: Annotated[
        Planned | Positive,
        Doc(
            "Strength of the shares, in units of the noise a client would need alone; `planned`: the one that leaves "
            "least noise in the sum."
        ),
    ] = "planned"
    tau2: Annotated[
        Literal["calibrated"] | NotNegative | tuple[NotNegative, ...],
        Doc("Size of the distortion; `calibrated`: the least that keeps the target in the joint view."),
    ] = "calibrated"
    threshold: Annotated[
        Count | None,
        Doc(
            "Fewest uploads of which `secagg-ddg` opens a sum; none: such that one round in a million is lost at the "
            "dropout rate of `privacy`."
        ),
    ] = None
    bands: Annotated[
        Count | None, Doc("Bands of the matrix of `central-mf`; none: the separation of the clients.")
    ] = None
    strategy: Annotated[
        str,
        OneOf(strategy_names),
        Doc(
            "Entries of that matrix: `optimised` for the least noise in the model (BandMF), or the square root of the "
            "matrix of prefix sums, cut off, which leaves 5 to 20 % more."
        ),
    ] = "optimised"
    carried_to_residual: Annotated[
        NotNegative | None,
        Doc("Variance that `niss-carried` carries over, in units of what stays; none: the best."),
    ] = None
    carry: Annotated[
        bool,
        Doc(
            "Carry noise from one round to the next: `niss` becomes `niss-carried`, where everyone shares with "
            'everyone (`graph = "complete"`), at kappa = 20 unless another is given.'
        ),
    ] = False
    closing: Annotated[
        bool,
        Doc("One more round of `niss-carried`, without data, takes out what the last one carried."),
    ] = False

    def __post_init__(self) -> None:
        if not self.title or self.title in (".", "..") or any(sign in self.title for sign in "/\\\0"):
            raise ConfigError(
                f"{self.title!r} cannot be the name of a folder", field="label", hint="give it another"
            )

    @property
    def title(self) -> str:
        """The name shown in tables and used for the folder of its run."""
        return self.label or self.name

    @property
    def kind(self) -> Method:
        """The method itself: which noise it adds and what that is worth."""
        from niss.methods import METHODS

        return METHODS[self.name]

    @property
    def distorts(self) -> Distortion | None:
        """How received shares are distorted; None where none are received, or tau2 is 0."""
        from niss.methods import DISTORTIONS

        return DISTORTIONS[self.distortion] if self.kind.uses("distortion") and self.tau2 != 0.0 else None


@settings
class ProtocolConfig:
    """How the real protocol is run when `exchange = "protocol"`."""

    grid_bits: Annotated[
        Annotated[int, Ge(1), Le(60)] | None,
        Doc("The grid has steps of 2^-bits; none: chosen for the noise."),
    ] = None
    modulus_bits: Annotated[Literal[32, 64], Doc("Bits of an uploaded number.")] = 64
