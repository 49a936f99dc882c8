"""What a person asks for: the parts of a plan, and the question that a planner is asked.

Types, defaults, ranges and meaning stand here and nowhere else. `Plan` is made of the four parts, and so are sections
of a simulation's settings; flags, query parameters, keys of `run_config` and the reference are made from the fields
(`niss.settings`). Nothing heavy is loaded for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from typing_extensions import Doc

from niss.errors import ConfigError
from niss.settings import Count, OneOf, Planned, Positive, Probability, Share, settings

if TYPE_CHECKING:
    from niss.accounting.planner import Forecast

Relation = Literal["zero-out", "replace-one"]
Pattern = Literal["cyclic", "any"]
SettledMode = Literal["tolerate", "repair"]
Mode = Annotated[
    SettledMode | Planned,
    Doc(
        "What happens to the noise of clients that drop out; `planned`: `repair` for silos, of which one that is lost "
        "would leave more than all other noise, else `tolerate`."
    ),
]
Dropout = Annotated[
    Share,
    Doc(
        "Probability with which each participant drops out of a round; where nobody is expected to, a repair is "
        "planned for 5 %."
    ),
]
Collusion = Annotated[
    Share,
    Doc(
        "Share of a round's participants that tell the server all they know, fixed before the beacon; in a coalition "
        "graph, of its largest group, and as many in each."
    ),
]

# What a planner is asked of: within these ranges every question is answered, or refused in words, in seconds. Beyond
# them squares and quotients leave the range of a double, or a run would be worked out round by round for hours.
_Clients = Annotated[int, Ge(1), Le(1_000_000_000)]
_Rounds = Annotated[int, Ge(1), Le(1_000_000)]
_Amount = Annotated[float, Ge(1e-9), Le(1e9)]
_MOST_CARRIED_ROUNDS = 5_000
# What has no meaning where noise is carried, and why; and what has none elsewhere.
_WITHIN_A_ROUND = {
    "neighbours": "the plan is for rounds in which everyone shares noise with everyone",
    "participations": "it follows from rounds, clients and participants",
    "tau2": "what a carried run promises depends on all of its rounds",
}
_ACROSS_ROUNDS = ("pattern", "for_", "separation", "closing", "carried_to_residual")


def _registered(module: str, table: str) -> Callable[[], Iterable[str]]:
    """The names in that table, once they are asked for."""
    return lambda: getattr(import_module(module), table)


method_names = _registered("niss.methods", "METHODS")
strategy_names = _registered("niss.mechanism.noise", "STRATEGIES")


@settings
class Target:
    """What every client is promised."""

    unit: Annotated[
        Literal["client", "record", "nbafl"],
        Doc(
            "What is hidden: a whole `client`, one `record`; `nbafl` is the paper's heuristic and promises nothing."
        ),
    ] = "client"
    relation: Annotated[
        Relation,
        Doc(
            "Neighbouring inputs: a client's update becomes zero, or any other; a record is there or not (`zero-out`)."
        ),
    ] = "zero-out"
    clip: Annotated[
        Positive,
        Doc(
            "L2 bound on an update (`client`) or on the gradient of one record (`record`); on single entries with "
            "`nbafl`."
        ),
    ] = 0.5
    batch: Annotated[
        Annotated[float, Gt(0), Le(1)] | None,
        Doc(
            "Unit `record`: probability with which each record is in a round's batch, drawn in secret by its silo."
        ),
    ] = None
    records: Annotated[
        Count | None,
        Doc(
            "Unit `record`: records of all silos together, public or a planned bound; the sum is divided by batch x "
            "records."
        ),
    ] = None
    epsilon: Annotated[
        Positive | tuple[Positive, ...], Doc("The target of every client, or one for each client.")
    ] = 3.0
    delta: Annotated[Probability, Doc("The target of every client.")] = 1e-5
    mechanism: Annotated[
        Literal["analytic", "classical"],
        Doc("`analytic` is exact. `classical` is proved for epsilon < 1 only."),
    ] = "analytic"
    allow_invalid: Annotated[
        bool, Doc("Allow `classical` where it is not proved; the run then promises nothing.")
    ] = False


@settings
class Sharing:
    """Who shares noise with whom, and what becomes of it."""

    neighbours: Annotated[
        Count,
        Doc("Unit shares each client sends; those that need more noise send more, in proportion."),
    ] = 10
    graph: Annotated[
        str,
        OneOf(_registered("niss.graph", "GRAPHS")),
        Doc("Who shares with whom: balanced and random, everyone, a plain random list, or within groups."),
    ] = "regular"
    groups: Annotated[
        tuple[tuple[int, ...], ...], Doc("The clients of each group of a coalition graph.")
    ] = ()
    distortion: Annotated[
        str,
        OneOf(_registered("niss.methods", "DISTORTIONS")),
        Doc(
            "How received shares are changed: `additive` (fresh noise), or by a factor for each share (`scalar`, the "
            "paper's letter) or coordinate."
        ),
    ] = "additive"


@settings
class Horizon:
    """How many rounds there are, and how often one client takes part in them."""

    participations: Annotated[
        Count | Planned,
        Doc(
            "Rounds of a client over which the target is composed; `planned`: as many as the horizon has room for, and "
            "without one a single round."
        ),
    ] = "planned"
    horizon: Annotated[
        Count | None,
        Doc(
            "Rounds of the whole run, whose graphs delta pays for, and to which methods that plan their noise for all "
            "of it are committed; none: `participations` times `separation`."
        ),
    ] = None
    separation: Annotated[
        Count, Doc("A client that takes part in round t stays out until round t + separation.")
    ] = 1
    pattern: Annotated[
        Pattern, Doc("Rounds of a client are exactly (`cyclic`) or at least (`any`) the separation apart.")
    ] = "cyclic"
    participants: Annotated[
        Count | None,
        Doc("Of every round, where noise is carried from one to the next; none: those of the first."),
    ] = None
    attempts: Annotated[
        Count, Doc("Most times a round may be tried again; each attempt may fail its collusion bound.")
    ] = 1
    chain_rounds: Annotated[
        Count | None,
        Doc(
            "Rounds of all beacon chains among which a server could choose: each of their graphs may fail the bound, "
            "shown or not; none: no more than the run has."
        ),
    ] = None


@settings
class Trust:
    """Who may turn out to be dishonest, or not there: shares, whose counts in a round are for a planner to know."""

    collusion: Collusion = 0.0
    dropout: Dropout = 0.0
    mode: Mode = "planned"


def settled_mode(mode: Mode, unit: str) -> SettledMode:
    """The mode that is asked for, or the usual one where it is left to be planned."""
    if mode == "planned":
        return "repair" if unit == "record" else "tolerate"
    return mode


@settings
class PlanQuestion:
    """The round, what every client is promised, and what may go wrong.

    Of a run that carries noise Python can also ask:

    separation           rounds from one participation of a client to its next; None: as many as all clients fill
    closing              one more round without data, as in `Committed`
    carried_to_residual  w / r; None: the best
    """

    participants: Annotated[
        Annotated[int, Ge(2), Le(1_000_000_000)],
        Doc("Clients in a round; where records are hidden, the silos."),
    ]
    unit: Annotated[
        Literal["client", "record"],
        Doc("What is hidden: all that a `client` holds, or one `record` of a silo, in secret batches."),
    ] = "client"
    records: Annotated[
        Annotated[int, Ge(1), Le(10**15)] | None, Doc("Records of all silos together, or a bound on them.")
    ] = None
    batch: Annotated[
        Annotated[float, Gt(0), Le(1)] | None,
        Doc("Probability with which each record is in a round's batch, drawn in secret by its silo."),
    ] = None
    neighbours: Annotated[Count | None, Doc("With how many others each shares noise; none: enough.")] = None
    clip: Annotated[_Amount, Doc("L2 bound on a client's update, or on the gradient of one record.")] = 1.0
    epsilon: Annotated[
        Annotated[float, Ge(1e-6), Le(1e6)],
        Doc("Promise over the whole training: what is seen changes any odds by at most e^epsilon."),
    ] = 3.0
    delta: Annotated[Probability, Doc("Probability that is left for the promise to fail.")] = 1e-5
    rounds: Annotated[_Rounds | None, Doc("Rounds of the whole training.")] = None
    participations: Annotated[
        _Rounds | None,
        Doc("Rounds one client takes part in; none: as many as `clients` asks for, or all."),
    ] = None
    collusion: Collusion = 0.0
    dropout: Dropout = 0.0
    mode: Mode = "planned"
    kappa: Annotated[
        Annotated[float, Ge(1e-6), Le(1e6)] | None, Doc("Strength of the shares; none: the cheapest.")
    ] = None
    tau2: Annotated[Annotated[float, Ge(0), Le(1e9)] | None, Doc("Ask what this distortion promises.")] = None
    relation: Annotated[
        Relation, Doc("What an update is replaced by, in what is promised: zero, or any other.")
    ] = "zero-out"
    parameters: Annotated[
        Annotated[int, Ge(1), Le(10**15)] | None,
        Doc(
            "Parameters of the model, to say whether it can learn under this noise; for records 10,000 unless "
            "given."
        ),
    ] = None
    carry: Annotated[bool, Doc("Carry noise shares to the next round, where they are taken out again.")] = (
        False
    )
    clients: Annotated[
        _Clients | None,
        Doc("All clients. Rounds are filled from them in turn, so this says how often each takes part."),
    ] = None
    pattern: Annotated[
        Pattern,
        Doc("How clients come back, where noise is carried: in fixed cohorts, or at least so far apart."),
    ] = "cyclic"

    for_: Annotated[
        Literal["publishing", "training"],
        Doc(
            "What noise is carried for: a good last model (`publishing`), or good ones on the way to it (`training`), "
            "which carries less."
        ),
    ] = "publishing"

    # What Python alone can ask of a run that carries noise.
    separation: _Rounds | None = None
    closing: bool = False
    carried_to_residual: Annotated[float, Ge(0), Le(1e9)] | None = None

    def __post_init__(self) -> None:
        if self.unit == "record":
            self._check_records()
        usual = {one.name: one.default for one in fields(PlanQuestion)}
        foreign = _WITHIN_A_ROUND if self.carry else dict.fromkeys(_ACROSS_ROUNDS, "")
        for name, reason in foreign.items():
            if getattr(self, name) != usual[name]:
                raise ConfigError(
                    f"does not go with carried shares: {reason}"
                    if self.carry
                    else "belongs to carried shares",
                    field=name,
                    hint="leave it out" if self.carry else "carry shares too, or leave it out",
                )
        self._check_clients()
        if self.carry and (self.rounds or 0) > _MOST_CARRIED_ROUNDS:
            raise ConfigError(
                f"carried shares are planned for at most {_MOST_CARRIED_ROUNDS} rounds, not {self.rounds}",
                field="rounds",
                hint="plan a shorter run; without carried shares there may be more rounds",
            )
        if self.rounds is not None and self.participations is not None and self.participations > self.rounds:
            raise ConfigError(
                f"{self.participations} participations do not fit into {self.rounds} rounds",
                field="participations",
                hint="raise the rounds or lower the participations",
            )

    def _check_clients(self) -> None:
        """How often a client takes part follows from the rounds and from all clients, or is given."""
        needing = "carried shares need" if self.carry else "the number of clients needs"
        for name in ("clients", "rounds") if self.carry else ("rounds",) if self.clients else ():
            if getattr(self, name) is None:
                raise ConfigError(
                    f"is missing, and {needing} it", field=name, hint="for example 100 rounds, 1000 clients"
                )
        if self.clients is None:
            return
        if self.participations is not None and not self.carry:
            raise ConfigError(
                "follows from rounds, clients and participants",
                field="participations",
                hint="give one of the two",
            )
        if self.clients < self.participants:
            raise ConfigError(
                f"{self.clients} cannot fill a round of {self.participants}",
                field="clients",
                hint="raise the clients or lower the participants",
            )

    def _check_records(self) -> None:
        """Silos take part in every round: nothing rests, and nothing can be carried past anyone."""
        for name in ("participations", "carry", "clients"):
            if getattr(self, name):
                raise ConfigError(
                    "does not go with records: their silos take part in every round",
                    field=name,
                    hint="leave it out",
                )

    @property
    def planned_participations(self) -> int:
        """As asked; else `ceil(rounds * participants / clients)`, or all rounds where nobody says how many clients."""
        if self.participations is None and self.clients is not None and self.rounds is not None:
            return -(-self.rounds * self.participants // self.clients)
        return self.participations or self.rounds or 1

    def asked(self) -> dict[str, Any]:
        """What differs from the defaults, by name."""
        return {
            one.name: getattr(self, one.name)
            for one in fields(PlanQuestion)
            if getattr(self, one.name) != one.default
        }

    def forecast(self, progress: Callable[[str], None] | None = None) -> Forecast:
        """The cheapest plan, and what it costs; `progress` as in `niss.accounting.forecast`."""
        from niss.accounting.planner import forecast

        return forecast(progress=progress, **self.asked())

    def to_json(self, planned: Forecast) -> dict[str, Any]:
        """The plan as `niss plan --json` prints it: the question, its answer and, for a model, the outlook."""
        from niss.accounting.judgement import judge_plan, judge_records

        names = ("unit", "carry", "rounds", "clients", "collusion", "dropout", "clip", "relation")
        values = {name: getattr(self, name) for name in names} | planned.to_json()
        if self.parameters is not None or self.unit == "record":
            values["outlook"] = judge_plan(self, planned).to_json()
        if self.unit == "record":
            values |= judge_records(self, planned)
        return values
