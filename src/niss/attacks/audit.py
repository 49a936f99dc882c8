"""`niss attack audit` and `niss attack carried`: what many rounds or runs show, beside what is claimed of them.

`audit` has canaries in rounds that stand alone, and the epsilon that they prove. `carried` has whole runs with shares
that are carried from round to round, attacked by statistics and by lying servers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from math import ceil, isfinite
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt
from typing_extensions import Doc

from niss import attacks
from niss.attacks import experiment
from niss.attacks.experiment import Experiment, Findings, Progress, Row
from niss.checks import BOOKS
from niss.claims import printed_claim, rounded_up
from niss.errors import ConfigError
from niss.settings import Count, Positive

if TYPE_CHECKING:
    from niss.accounting import Committed, RoundPlan
    from niss.attacks.canary import MeasuredMu
    from niss.attacks.estimates import FloatArray
    from niss.attacks.rounds import RoundSetting
    from niss.attacks.runs import CyclicRun, Pair, SeenRun
    from niss.charts import Chart, Curves, Rows
    from niss.methods.look import Look

_BEYOND = 1.2
# An epsilon, at delta 1e-5, with mu near 3; and a bound on the records of all silos, by which their sum is divided.
_NEAR_3, _RECORDS = 16.0, 1000


@dataclass(frozen=True, kw_only=True)
class AuditExperiment(Experiment):
    """Canary audit: a lower bound on epsilon from true- and false-positive rates, beside what is claimed.

    NISS calibrated, NISS as printed (tau = 0) and DP-FedAvg, each with canaries in half of its rounds (see
    `niss.attacks.canary`). What is proved above a claim refutes it; what is proved below says nothing against it. With
    tau = 0 only the marginal claim exists, and it is refuted.

    With `--unit record` the canary is a record of a silo, there or left out, and every round one of the real protocol,
    with nodes, keys and ledgers of its own; what the first node was charged is the claim. The promise is a weak one on
    purpose: near mu = 3 few rounds tell whether the whole claim is reached.

    rounds       as many with the canary as without; the bound grows slowly with them
    dimension    coordinates of an update; the guarantee does not depend on them
    confidence   with which each bound holds

    Examples:
        niss attack audit --rounds 100000 --out runs/audit
        niss attack audit --unit record --clients 5 --batches 1,0.5,0.1
        niss attack audit --json
    """

    name = "audit"
    columns: ClassVar[dict[str, str]] = {
        "case": "Case",
        "joint": "ε claimed, joint",
        "marginal": "ε claimed, marginal",
        "proved": "ε proved",
        "true_positive": "True positives",
        "false_positive": "False positives",
        "counted": "Rounds counted",
        "mu": "μ claimed",
        "measured": "μ measured",
        "verdict": "What follows",
    }

    unit: Annotated[
        Literal["client", "record"],
        Doc("What is hidden: a whole client, or a record of a silo, in rounds of the real protocol."),
    ] = "client"
    clients: experiment.Clients = 12
    epsilon: Annotated[
        float | None, Doc("Privacy target; default: that of the plan, or 16 where records are hidden.")
    ] = None
    neighbours: experiment.Neighbours = 4.0
    batches: Annotated[
        tuple[Annotated[float, Gt(0), Le(1)], ...],
        Doc("Unit record: comma-separated probabilities with which each record is in a batch."),
    ] = (1.0, 0.25)
    rounds: Annotated[
        Annotated[int, Ge(100)] | None,
        Doc("With the canary, and as many without; default: 100000, or 2000 of records."),
    ] = None
    dimension: Annotated[int, Ge(2), Doc("Coordinates of the canary.")] = 8
    confidence: Annotated[float, Ge(0.5), Lt(1), Doc("Of each lower bound.")] = 0.95

    def check(self) -> None:
        """Refuse what cannot be used."""
        super().check()
        for setting in self._cases().values():
            self._round(setting)

    def setting(self) -> RoundSetting:
        """The plan with so many neighbours; silos are few, and each has all others."""
        if self.unit == "record":
            return self.silo_setting(_RECORDS, epsilon=self.epsilon or _NEAR_3)
        return self.make_setting(neighbours=self.neighbours)

    def _cases(self) -> dict[str, RoundSetting]:
        setting = self.setting()
        if self.unit == "record":
            return {f"niss, q = {batch:g}": setting.with_plan(batch=batch) for batch in self.batches}
        return {
            "niss, calibrated τ²": setting,
            "niss, τ = 0": setting.with_plan(tau2=0.0),
            "dp-fedavg": setting.with_plan(method="dp-fedavg"),
        }

    def _round(self, setting: RoundSetting) -> RoundPlan:
        plan = setting.plan
        weight = 1.0 / ((plan.batch or 1.0) * (plan.records or self.clients))
        return plan.for_round(range(self.clients), weights=weight, records=1.0, beacon=b"audit")

    def attack(self, findings: Findings, progress: Progress) -> None:
        """Score canaries in every case, and bound epsilon from below."""
        canary, of_records = attacks.canary, self.unit == "record"
        for name, setting in self._cases().items():
            plan, planned = self._round(setting), setting.plan
            # The worst protected client; where nobody is protected, the first.
            victim = int(plan.joint_mu.argmax())
            mu, delta, batch = float(plan.joint_mu[victim]), planned.gaussian_delta, planned.batch or 1.0
            options: dict[str, Any] = {
                "dimension": self.dimension,
                "rounds": self.rounds or (2_000 if of_records else 100_000),
                "stream": self.stream(name),
                "progress": partial(progress, name),
            }
            if of_records:
                scores, mu = canary.record_scores(planned, self.clients, **options)
            else:
                scores = canary.canary_scores(plan, victim, **options)
            claim = canary.Claim(mu, batch)
            bound = canary.epsilon_bound(scores, delta, self.confidence, claim)
            row = {
                "case": name,
                "method": planned.kind.name,
                "joint": claim.epsilon(delta),
                "marginal": canary.Claim(float(plan.marginal_mu[victim]), batch).epsilon(delta),
                **asdict(bound),
                "mu": mu,
                "measured": None,
                "batch": planned.batch,
            }
            if batch == 1.0 and isfinite(mu):
                row |= asdict(canary.measure_mu(scores, self.confidence)) | {"proved": bound.proved}
            findings.rows.append(row | {"verdict": _verdict(row)})
            findings.curves.setdefault("rates", {})[name] = canary.rates(scores, claim)

    def headline(self, findings: Findings) -> str:
        """What is proved of each case, beside the claim."""
        parts = []
        for row in findings.rows:
            claimed = printed_claim(row["joint"])
            claimed += " claimed" * isfinite(row["joint"])
            part = f"{row['case']}: ε ≥ {row['proved']:.2f} proved, {claimed} in the joint view"
            if row["measured"] is not None:
                part += f", μ {row['measured']:.3g} measured of {row['mu']:.3g}"
            parts.append(part)
        return "; ".join(parts) + f" (each with {100 * self.confidence:g} % confidence)."

    def charts(self, findings: Findings) -> list[Chart]:
        """Canaries found over false alarms, and what the claim allows; and claims and proof case by case."""
        return [_rates(findings), _claims(findings)] if findings.rows else []


def _verdict(row: Row) -> str:
    """Which claim is refuted; in the cases here the marginal one is never above the joint one."""
    if row["proved"] > row["joint"] or row["excess"] > 0.0:
        return "the joint claim is refuted"
    if row["proved"] > row["marginal"]:
        return "the marginal claim is refuted"
    return "consistent with the claims"


def _is_claimed(row: Row) -> bool:
    return isfinite(row["joint"])


def _look(findings: Findings, number: int) -> Look:
    """That of the case's method; batches of one method are told apart by their number."""
    from niss.charts import numbered
    from niss.methods import look_of

    row = findings.rows[number]
    return numbered(number) if row.get("batch") else look_of(row["method"], protected=_is_claimed(row))


def _rates(findings: Findings) -> Curves:
    """Points as measured, and the line that the claim allows; the diagonal is a guess by chance."""
    from niss.charts import Curves, Series, points
    from niss.methods.look import DOTTED, QUIET, Look

    series, chance = [], list[float]()
    for number, (case, curve) in enumerate(findings.curves["rates"].items()):
        look = _look(findings, number)
        alarms = curve["false_positive"]
        series.append(Series(f"{case}: allowed at most", look, points(alarms, curve["most"], "xy")))
        found = points(alarms, curve["true_positive"], "xy")
        series.append(Series(f"{case}: measured", look, found, line=False))
        chance += (x for x, _ in found)
    ends = [(x, x) for x in (min(chance), max(chance))] if chance else []
    series.append(Series("guessing", Look(QUIET, "", DOTTED), ends))
    return Curves(
        title="Canaries found by false alarms",
        across="False alarms",
        up="Canaries found",
        series=series,
        log="xy",
        head="False alarms",
    )


def _claims(findings: Findings) -> Rows:
    """A bar for what is proved, with marks where the claims are."""
    from niss.charts import Mark, Rows
    from niss.methods.look import INK, Look

    known = [row[key] for row in findings.rows for key in ("proved", "joint") if isfinite(row[key])]
    # Where a claim is missing, its mark stands beyond the largest value.
    nothing = _BEYOND * max(known)
    rows = []
    for number, row in enumerate(findings.rows):
        proved, marginal, look = row["proved"], row["marginal"], _look(findings, number)
        joint = row["joint"] if _is_claimed(row) else nothing
        marks = [
            Mark("proved by the audit", look, proved, f"{proved:.2f}", bar=True),
            Mark("claimed, marginal view", Look(INK, "D", hollow=True), marginal, rounded_up(marginal)),
            Mark("claimed, joint view", Look(INK, "d"), joint, printed_claim(row["joint"])),
        ]
        rows.append((row["case"], marks))
    return Rows(
        title="What is claimed, and what the audit proves",
        across="ε at the plan’s δ",
        rows=rows,
        nothing=None if all(map(_is_claimed, findings.rows)) else nothing,
    )


@dataclass(frozen=True, kw_only=True)
class CarriedExperiment(Experiment):
    """Noise that cancels across rounds: the best test over a whole run, and servers that break its rules.

    Statistics: the likelihood ratio over all (client, round), the sums of two rounds and of all, and the averages of
    the victim's uploads and of its rounds. Whole runs are played with and without the victim's data, and the mu that
    the scores show stands beside the exact one and the one that was charged. The likelihood ratio has to reach the
    charge, and nothing may exceed it.

    Servers: those that end early, repeat or skip rounds, call cohorts dropped, call each round the last, seat a client
    twice or replace the next cohort (`niss.attacks.runs`); exactly, with the rule that forbids it off and on.

    clients      participants of a round; all together are `separation` times as many
    colluders    of a round, where some are assumed
    dropped      of a round, that repairs may call dropped, where some may

    Examples:
        niss attack carried --out runs/carried
        niss attack carried --clients 8 --rounds 60 --separation 15 --runs 5000
    """

    name = "carried"
    columns: ClassVar[dict[str, str]] = {
        "attack": "Attack",
        "rule": "Rule",
        "mu": "μ reached",
        "claimed": "μ charged",
        "ratio": "Reached ÷ charged",
        "measured": "μ measured",
        "low": "from",
        "high": "to",
        "outcome": "What follows",
    }

    clients: experiment.Clients = 12
    rounds: Annotated[int, Ge(3), Doc("Rounds of the run, all committed before the first.")] = 40
    separation: Annotated[int, Ge(2), Doc("Rounds from one participation to the next.")] = 10
    kappa: Annotated[Positive, Doc("Shares within a round over the noise a client would need alone.")] = 20.0
    colluders: Annotated[Count, Doc("Of each round, in the cases with colluders.")] = 2
    dropped: Annotated[Count, Doc("Of each round, that repairs may call dropped.")] = 1
    runs: Annotated[int, Ge(100), Doc("Runs with the victim's data, and as many without.")] = 20_000
    confidence: Annotated[float, Gt(0), Lt(1), Doc("Of each interval.")] = 0.999

    def check(self) -> None:
        """Refuse what cannot be used."""
        super().check()
        most = max(self.colluders, self.dropped)
        if self.clients < 4 or most > self.clients - 2:
            raise ConfigError(
                f"{most} of {self.clients} clients leave too few honest",
                field="--colluders" if most == self.colluders else "--dropped",
                hint="at least 4 clients, two of them honest",
            )
        if self.rounds <= self.separation:
            raise ConfigError(
                f"a run of {self.rounds} rounds is over before anybody comes back",
                field="--separation",
                hint="fewer rounds from one participation to the next, or a longer run",
            )
        _ = self.plans

    @cached_property
    def plans(self) -> dict[str, Committed]:
        """Three plans for the same promise: nothing assumed, colluders, and clients that are called dropped."""
        from niss.accounting import Plan
        from niss.accounting.calibration import CarriedSearch, safely_within

        target = self.setting().plan
        epsilon = target.epsilon if isinstance(target.epsilon, float) else min(target.epsilon)
        plan = Plan(
            method="niss-carried",
            graph="complete",
            epsilon=epsilon,
            delta=target.delta,
            participations=ceil(self.rounds / self.separation),
            horizon=self.rounds,
            separation=self.separation,
        )
        search = CarriedSearch.of(plan, self.clients)
        assumed = {
            "plain": search.draft.noise,
            "colluders": replace(search.draft.noise, colluders=self.colluders),
            "dropped": replace(search.draft.noise, dropped=self.dropped),
        }
        searches = {
            name: replace(search, draft=replace(search.draft, noise=noise)) for name, noise in assumed.items()
        }
        return {name: safely_within(one.at(self.kappa, None), search.mu**2) for name, one in searches.items()}

    def attack(self, findings: Findings, progress: Progress) -> None:
        """Play runs by the thousand for the statistics, then compute what each server gets."""
        runs = attacks.runs
        plain, colluding, dropping = (runs.CyclicRun(self.plans[name]) for name in self.plans)
        with _one_thread():
            for name, run, seen, weights in self._scenes(plain, colluding):
                scores = seen.scores(
                    run.victim,
                    weights,
                    runs=self.runs,
                    stream=self.stream("scores", name),
                    progress=partial(progress, name),
                )
                for statistic, chosen in weights.items():
                    found = attacks.canary.measure_mu(scores[statistic], self.confidence)
                    pair = runs.Pair(seen.mu(run.victim, chosen), run.claimed)
                    row = _carried_row(statistic, None, pair, _measured_verdict(found, pair))
                    findings.rows.append(row | asdict(found))
            for number, (name, server) in enumerate(runs.SERVERS.items(), start=1):
                outcome = server(plain, colluding, dropping)
                findings.rows.append(_carried_row(name, "off", outcome.off, "within the charge"))
                findings.rows.append(_carried_row(name, "on", outcome.on, outcome.ending))
                progress("servers", number, len(runs.SERVERS), name)

    def _scenes(
        self, plain: CyclicRun, colluding: CyclicRun
    ) -> Iterator[tuple[str, CyclicRun, SeenRun, dict[str, FloatArray]]]:
        """Runs to be played, as they are seen, and statistics by name: likelihood ratios, and plain sums."""
        seen, victim, visits = attacks.runs.SeenRun.of(plain.honest), plain.victim, plain.visits
        yield "runs", plain, seen, {"likelihood ratio": seen.best_weights(victim)}
        known = attacks.runs.SeenRun.of(colluding.honest, colluding.colluders)
        best = known.best_weights(colluding.victim)
        yield "runs, colluders", colluding, known, {"likelihood ratio, colluders": best}
        pairs = [seen.added_up((t, t + 1)) for t in visits if t + 1 < self.rounds]
        sums = {
            "two rounds added up": max(pairs, key=partial(seen.mu, victim)),
            "all rounds added up": seen.added_up(range(self.rounds)),
            "its uploads averaged": seen.move(victim),
            "its rounds averaged": seen.added_up(visits),
        }
        yield "runs, sums", plain, seen, sums

    def headline(self, findings: Findings) -> str:
        """What was measured beside the charge, and the best that a server could do."""
        best = next(row for row in findings.rows if row["measured"] is not None)
        off = max((row for row in findings.rows if row["rule"] == "off"), key=lambda row: float(row["ratio"]))
        most = max(row["ratio"] for row in findings.rows if row["rule"] != "off")
        return (
            f"The likelihood ratio over the whole run measures μ = {best['measured']:.3f} "
            f"({best['low']:.3f} to {best['high']:.3f} with {100 * self.confidence:g} % confidence); "
            f"{best['claimed']:.3f} was charged. While the rules hold nothing reaches more than {most:.3f} of the "
            f"charge. Without its rule the server that “{off['attack']}” would reach {off['ratio']:.2f} times as much."
        )

    def charts(self, findings: Findings) -> list[Chart]:
        """mu reached over mu charged, attack by attack, with the rule that forbids it off and on."""
        from niss.charts import Mark, numbered
        from niss.methods.look import GREEN, Look

        names = {"off": ("server, rule off", numbered(1)), "on": ("server, rule on", numbered(0))}
        exact = ("statistic, exact", Look(numbered(0).colour, "D"))
        measured = ("statistic, measured", Look(GREEN, "s", hollow=True))
        marks = []
        for row in findings.rows:
            reached = [(names.get(row["rule"], exact), row["ratio"])]
            if row["measured"] is not None:
                reached.append((measured, row["measured"] / row["claimed"]))
            marks += [(row["attack"], Mark(*named, share, f"{share:.3f}")) for named, share in reached]
        title = "What each attack reaches of the charge"
        return [experiment.rules_chart(title, "μ reached ÷ μ charged", marks)]


def _one_thread() -> AbstractContextManager[object]:
    """Matrices of some hundred rows: more threads of the linear algebra only wait for each other."""
    try:
        from threadpoolctl import threadpool_limits
    except ModuleNotFoundError:
        return nullcontext()
    limits: AbstractContextManager[object] = threadpool_limits(limits=1)
    return limits


def _carried_row(name: str, rule: str | None, pair: Pair, outcome: str) -> Row:
    """One line of the table; an outcome that the numbers deny is replaced."""
    return {
        "attack": name,
        "rule": rule,
        "mu": pair.reached,
        "claimed": pair.charged,
        "ratio": pair.ratio,
        **dict.fromkeys(("measured", "low", "high")),
        "outcome": "more than was charged" if pair.ratio > 1.0 + BOOKS else outcome,
    }


def _measured_verdict(found: MeasuredMu, pair: Pair) -> str:
    if max(found.low, found.proved) > pair.charged:
        return "the claim is refuted"
    if pair.ratio < 1.0 - BOOKS:
        return "stays below the claim"
    return "reaches the claim" if found.high >= pair.charged else "measured below the claim"
