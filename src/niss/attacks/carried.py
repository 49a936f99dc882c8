"""`niss attack carried`: a whole training with carried shares, attacked by statistics and by lying servers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, ClassVar

from niss import attacks
from niss.attacks.experiment import Clients, Experiment, Findings, Help, Progress, Row
from niss.checks import BOOKS
from niss.errors import ConfigError

if TYPE_CHECKING:
    from niss.accounting import Committed
    from niss.attacks.carried_runs import FloatArray, MeasuredMu, SeenRun
    from niss.attacks.carried_servers import CarriedTraining
    from niss.charts import Chart

# Between two exact computations.


@dataclass(frozen=True, kw_only=True)
class CarriedExperiment(Experiment):
    """Noise that cancels across rounds: the best test over a whole run, and servers that break its rules.

    Statistics: the likelihood ratio over all (client, round), the sums of two rounds and of all, and the averages of
    the victim's uploads and of its rounds. Whole runs are played with and without the victim's data, and the mu that
    the scores show stands beside the exact one and the one that was charged. The likelihood ratio has to reach the
    charge, and nothing may exceed it.

    Servers: those that end early, repeat rounds, call cohorts dropped, call each round the last, tell different
    horizons, seat a client twice or replace the next cohort (`niss.attacks.carried_servers`); exactly, with the rule
    that forbids it off and on.

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

    clients: Clients = 12
    rounds: Annotated[int, Help("Rounds of the run, all committed before the first.", least=3)] = 40
    separation: Annotated[int, Help("Rounds from one participation to the next.", least=2)] = 10
    kappa: Annotated[float, Help("Shares within a round over the noise a client would need alone.")] = 20.0
    colluders: Annotated[int, Help("Of each round, in the cases with colluders.", least=1)] = 2
    dropped: Annotated[int, Help("Of each round, that repairs may call dropped.", least=1)] = 1
    runs: Annotated[int, Help("Runs with the victim's data, and as many without.", least=100)] = 20_000
    confidence: Annotated[float, Help("Of each interval.")] = 0.999

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
        if not 0.0 < self.confidence < 1.0:
            raise ConfigError(f"must lie between 0 and 1, not {self.confidence!r}", field="--confidence")
        if not self.kappa > 0.0:
            raise ConfigError(f"must be above 0, not {self.kappa!r}", field="--kappa")
        _ = self.plans

    @cached_property
    def plans(self) -> dict[str, Committed]:
        """Three plans for the same promise: nothing assumed, colluders, and clients that are called dropped."""
        from niss.accounting import plan_carried

        target = self.setting().plan
        epsilon = target.epsilon if isinstance(target.epsilon, float) else min(target.epsilon)
        share = self.colluders / self.clients
        assumed = {"plain": (0.0, 0), "colluders": (share, 0), "dropped": (0.0, self.dropped)}
        return {
            name: plan_carried(
                participants=self.clients,
                clients=self.clients * self.separation,
                rounds=self.rounds,
                epsilon=epsilon,
                delta=target.delta,
                kappa=self.kappa,
                collusion=collusion,
                declared_dropped=dropped,
            ).plan
            for name, (collusion, dropped) in assumed.items()
        }

    def run(self, findings: Findings, progress: Progress) -> None:
        """Play runs by the thousand for the statistics, then compute what each server gets."""
        from niss.attacks import carried_servers as servers

        trainings = {name: servers.CarriedTraining(plan) for name, plan in self.plans.items()}
        with attacks.carried_runs.one_thread():
            for scene in self._scenes(trainings):
                findings.rows += self._played(scene, progress)
            assumed = servers.Assumed(trainings["colluders"], trainings["dropped"], self.stream("servers"))
            for number, (name, server) in enumerate(servers.SERVERS.items(), start=1):
                outcome = server(trainings["plain"], assumed)
                findings.rows.append(_row(name, "off", *outcome.off, "within the charge"))
                findings.rows.append(_row(name, "on", *outcome.on, outcome.ending))
                progress("servers", number, len(servers.SERVERS), name)
        findings.headline = _headline(findings, self.confidence)
        findings.finished = True

    def _scenes(self, trainings: dict[str, CarriedTraining]) -> Iterator[_Scene]:
        """The likelihood ratio with and without colluders, and plain sums."""
        from niss.attacks.carried_servers import against_colluders

        runs = attacks.carried_runs
        plain, colluding = trainings["plain"], trainings["colluders"]
        seen, victim, visits = plain.seen, plain.victim, plain.visits
        pairs = [runs.added_up(seen, (t, t + 1)) for t in visits if t + 1 < self.rounds]
        sums = {
            "two rounds added up": max(pairs, key=partial(seen.mu, victim)),
            "all rounds added up": runs.added_up(seen, range(self.rounds)),
            "its uploads averaged": seen.move(victim),
            "its rounds averaged": runs.added_up(seen, visits),
        }
        weights = {"likelihood ratio": seen.best_weights(victim)}
        yield _Scene("runs", seen, victim, plain.claimed, weights)
        known = against_colluders(colluding)
        weights = {"likelihood ratio, colluders": known.best_weights(colluding.victim)}
        yield _Scene("runs, colluders", known, colluding.victim, colluding.claimed, weights)
        yield _Scene("runs, sums", seen, victim, plain.claimed, sums)

    def _played(self, scene: _Scene, progress: Progress) -> list[Row]:
        """A row for each statistic, on the same runs."""
        runs = attacks.carried_runs
        without, present = runs.play_scores(
            scene.seen,
            scene.victim,
            list(scene.weights.values()),
            runs=self.runs,
            stream=self.stream("scores", scene.name),
            progress=partial(progress, scene.name),
        )
        rows = []
        for number, (name, weights) in enumerate(scene.weights.items()):
            found = runs.measure_mu(without[number], present[number], self.confidence)
            reached = scene.seen.mu(scene.victim, weights)
            row = _row(name, None, reached, scene.claimed, _verdict(found, reached, scene.claimed))
            row |= {"measured": found.mu, "low": found.low, "high": found.high, "proved": found.proved}
            rows.append(row)
        return rows

    def charts(self, findings: Findings) -> list[Chart]:
        """mu reached over mu charged, attack by attack, with the rule that forbids it off and on."""
        from niss.charts import Mark, Rows, numbered
        from niss.methods.look import GREEN, Look

        names = {"off": ("server, rule off", numbered(1)), "on": ("server, rule on", numbered(0))}
        exact = ("statistic, exact", Look(numbered(0).colour, "D"))
        rows: dict[str, list[Mark]] = {}
        for row in findings.rows:
            name, look = names.get(row["rule"], exact)
            marks = rows.setdefault(row["attack"], [])
            marks.append(Mark(name, look, row["ratio"], f"{row['ratio']:.3f}"))
            if row["measured"] is not None:
                share = row["measured"] / row["claimed"]
                look = Look(GREEN, "s", hollow=True)
                marks.append(Mark("statistic, measured", look, share, f"{share:.3f}"))
        return [
            Rows(
                title="What each attack reaches of the charge",
                across="μ reached ÷ μ charged",
                rows=list(rows.items()),
                level=("charged", 1.0),
            )
        ]


@dataclass(frozen=True)
class _Scene:
    """A run that is played many times, and the statistics that are tried on it, by name."""

    name: str
    seen: SeenRun
    victim: int
    claimed: float
    weights: dict[str, FloatArray]


def _row(name: str, rule: str | None, reached: float, charged: float, outcome: str) -> Row:
    """One line of the table; an outcome that the numbers deny is replaced."""
    if reached > charged * (1.0 + BOOKS):
        outcome = "more than was charged"
    return {
        "attack": name,
        "rule": rule,
        "mu": reached,
        "claimed": charged,
        "ratio": reached / charged,
        "measured": None,
        "low": None,
        "high": None,
        "outcome": outcome,
    }


def _verdict(found: MeasuredMu, reached: float, claimed: float) -> str:
    if max(found.low, found.proved) > claimed:
        return "the claim is refuted"
    if reached < claimed * (1.0 - BOOKS):
        return "stays below the claim"
    return "reaches the claim" if found.high >= claimed else "measured below the claim"


def _headline(findings: Findings, confidence: float) -> str:
    best = next(row for row in findings.rows if row["measured"] is not None)
    off = max((row for row in findings.rows if row["rule"] == "off"), key=lambda row: float(row["ratio"]))
    most = max(row["ratio"] for row in findings.rows if row["rule"] != "off")
    return (
        f"The likelihood ratio over the whole run measures μ = {best['measured']:.3f} "
        f"({best['low']:.3f} to {best['high']:.3f} with {100 * confidence:g} % confidence); {best['claimed']:.3f} was "
        f"charged. While the rules hold nothing reaches more than {most:.3f} of the charge. Without its rule the "
        f"server that “{off['attack']}” would reach {off['ratio']:.2f} times as much."
    )
