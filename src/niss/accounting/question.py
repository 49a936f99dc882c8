"""What a planner is asked: one value for the command line, the planner's page and Python.

Flags, query parameters and their help are made from the fields (`niss.settings`), and answered by `answer`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge
from typing_extensions import Doc

from niss.errors import ConfigError
from niss.settings import Count, NotNegative, Positive, Probability, Share, described, settings

if TYPE_CHECKING:
    from niss.accounting.forecasts import CarriedForecast, PlanForecast

# What has no meaning where noise is carried, and why; and what has none elsewhere.
_WITHIN_A_ROUND = {
    "neighbours": "the plan is for rounds in which everyone shares noise with everyone",
    "participations": "it follows from rounds, clients and participants",
    "tau2": "what a carried run promises depends on all of its rounds",
}
_ACROSS_ROUNDS = ("clients", "pattern")


@settings
class PlanQuestion:
    """The round, what every client is promised, and what may go wrong."""

    participants: Annotated[Annotated[int, Ge(2)], Doc("Clients in a round.")]
    neighbours: Annotated[Annotated[float, Ge(1)] | None, Doc("Unit shares each sends; none: enough.")] = None
    clip: Annotated[Positive, Doc("L2 bound on a client's update.")] = 1.0
    epsilon: Annotated[Positive, Doc("Target over all participations.")] = 3.0
    delta: Annotated[Probability, Doc("Target over all participations.")] = 1e-5
    rounds: Annotated[Count | None, Doc("Rounds of the whole training.")] = None
    participations: Annotated[Count | None, Doc("Rounds one client takes part in; none: all.")] = None
    collusion: Annotated[Share, Doc("Share of participants that collude with the server.")] = 0.0
    dropout: Annotated[Share, Doc("Share of participants that drop out.")] = 0.0
    mode: Annotated[Literal["tolerate", "repair"], Doc("What dropouts do.")] = "tolerate"
    kappa: Annotated[Positive | None, Doc("Strength of the shares; none: the cheapest.")] = None
    tau2: Annotated[NotNegative | None, Doc("Ask what this distortion promises.")] = None
    relation: Annotated[Literal["zero-out", "replace-one"], Doc("Neighbouring updates.")] = "zero-out"
    parameters: Annotated[
        Count | None, Doc("Size of the model: say whether it can learn anything under this noise.")
    ] = None
    carry: Annotated[bool, Doc("Carry noise shares to the next round, where they are taken out again.")] = (
        False
    )
    clients: Annotated[
        Count | None, Doc("All clients, where noise is carried; rounds are filled from them in turn.")
    ] = None
    pattern: Annotated[
        Literal["cyclic", "any"],
        Doc("How clients come back, where noise is carried: in fixed cohorts, or at least so far apart."),
    ] = "cyclic"

    def __post_init__(self) -> None:
        usual = {setting.name: setting.default for setting in described(PlanQuestion)}
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
        for name in ("clients", "rounds") if self.carry else ():
            if getattr(self, name) is None:
                raise ConfigError(
                    "is missing, and carried shares need it",
                    field=name,
                    hint="for example 100 rounds, 1000 clients",
                )
        if self.rounds is not None and self.participations is not None and self.participations > self.rounds:
            raise ConfigError(
                f"{self.participations} participations do not fit into {self.rounds} rounds",
                field="participations",
                hint="raise the rounds or lower the participations",
            )

    def asked(self) -> dict[str, Any]:
        """What differs from the defaults, by name."""
        return {
            setting.name: getattr(self, setting.name)
            for setting in described(PlanQuestion)
            if getattr(self, setting.name) != setting.default
        }

    def forecast(
        self, *, search: bool = False, progress: Callable[[str], None] | None = None
    ) -> PlanForecast | CarriedForecast:
        """The cheapest plan, and what it costs; `search` and `progress` as in `niss.accounting.forecast`."""
        from niss.accounting.planner import forecast, forecast_carried

        values = {setting.name: getattr(self, setting.name) for setting in described(PlanQuestion)}
        for name in (
            "carry",
            "parameters",
            *(_WITHIN_A_ROUND if self.carry else ("rounds", *_ACROSS_ROUNDS)),
        ):
            del values[name]
        if self.carry:
            return forecast_carried(**values, progress=progress)
        values["participations"] = self.participations or self.rounds or 1
        return forecast(**values, search=search, progress=progress)

    def to_json(self, planned: PlanForecast | CarriedForecast) -> dict[str, Any]:
        """The plan as `niss plan --json` prints it: the question, its answer and, for a model, the outlook."""
        from niss.accounting.judgement import judge_plan

        names = ("carry", "rounds", "dropout", "clip", "relation")
        values = {name: getattr(self, name) for name in names} | planned.to_json()
        if self.parameters is not None:
            judged = judge_plan(planned, parameters=self.parameters, rounds=self.rounds, clip=self.clip)
            values["outlook"] = judged.to_json()
        return values
