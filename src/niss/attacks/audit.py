"""`niss attack audit`: canaries over many rounds, and the epsilon they prove beside the one that is claimed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Annotated, ClassVar

from niss import attacks
from niss.attacks.experiment import Clients, Experiment, Findings, Help, Neighbours, Progress, Row
from niss.claims import printed_claim, rounded_up
from niss.errors import ConfigError

if TYPE_CHECKING:
    from niss.accounting import RoundPlan
    from niss.charts import Chart, Curves, Rows

_BEYOND = 1.2


@dataclass(frozen=True, kw_only=True)
class AuditExperiment(Experiment):
    """Canary audit: a lower bound on epsilon from true- and false-positive rates, beside what is claimed.

    NISS calibrated, NISS as printed (tau = 0) and DP-FedAvg, each with canaries in half of its rounds (see
    `niss.attacks.canary`). What is proved above a claim refutes it; what is proved below says nothing against it. With
    tau = 0 only the marginal claim exists, and it is refuted.

    rounds       as many with the canary as without; the bound grows slowly with them
    dimension    coordinates of an update; the guarantee does not depend on them
    confidence   with which each bound holds

    Examples:
        niss attack audit --rounds 100000 --out runs/audit
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
        "verdict": "What follows",
    }

    clients: Clients = 12
    neighbours: Neighbours = 4.0
    rounds: Annotated[int, Help("Rounds with the canary, and as many without.", least=100)] = 100_000
    dimension: Annotated[int, Help("Coordinates of the canary.", least=1)] = 8
    confidence: Annotated[float, Help("Of each lower bound.")] = 0.95

    def check(self) -> None:
        """Refuse what cannot be used."""
        super().check()
        if not 0.5 <= self.confidence < 1.0:
            raise ConfigError(
                f"must be at least 0.5 and below 1, not {self.confidence!r}", field="--confidence"
            )
        for setting in self._cases().values():
            self._round(setting)

    def setting(self) -> attacks.RoundSetting:
        """The plan with so many neighbours."""
        return self.make_setting(neighbours=self.neighbours)

    def _cases(self) -> dict[str, attacks.RoundSetting]:
        setting = self.setting()
        return {
            "niss, calibrated τ²": setting,
            "niss, τ = 0": setting.with_plan(tau2=0.0),
            "dp-fedavg": setting.with_plan(method="dp-fedavg"),
        }

    def _round(self, setting: attacks.RoundSetting) -> RoundPlan:
        return setting.plan.for_round(
            range(self.clients), weights=1.0 / self.clients, records=1.0, beacon=b"audit"
        )

    def run(self, findings: Findings, progress: Progress) -> None:
        """Score canaries in every case, and bound epsilon from below."""
        from niss.mechanism import gdp_epsilon

        canary = attacks.canary
        for name, setting in self._cases().items():
            plan = self._round(setting)
            # The worst protected client; where nobody is protected, the first.
            victim = int(plan.joint_mu.argmax())
            mu, delta = float(plan.joint_mu[victim]), setting.plan.delta
            scores = canary.canary_scores(
                plan,
                victim,
                dimension=self.dimension,
                rounds=self.rounds,
                stream=self.stream(name),
                progress=partial(progress, name),
            )
            bound = canary.epsilon_bound(scores, delta, self.confidence)
            joint = gdp_epsilon(mu, delta)
            marginal = gdp_epsilon(float(plan.marginal_mu[victim]), delta)
            findings.rows.append(
                {
                    "case": name,
                    "method": setting.plan.method,
                    "joint": joint,
                    "marginal": marginal,
                    "proved": bound.epsilon,
                    "true_positive": bound.true_positive,
                    "false_positive": bound.false_positive,
                    "counted": bound.counted,
                    "verdict": _verdict(bound.epsilon, joint, marginal),
                    "mu": mu,
                }
            )
            findings.curves.setdefault("rates", {})[name] = canary.rates(scores, mu)
        findings.headline = _headline(findings, self.confidence)
        findings.finished = True

    def charts(self, findings: Findings) -> list[Chart]:
        """Canaries found over false alarms, and what the claim allows; and claims and proof case by case."""
        return [_rates(findings), _claims(findings)] if findings.rows else []


def _verdict(proved: float, joint: float, marginal: float) -> str:
    """Which claim the proved epsilon refutes; in the cases here the marginal one is never above the joint one."""
    if proved > joint:
        return "the joint claim is refuted"
    if proved > marginal:
        return "the marginal claim is refuted"
    return "consistent with the claims"


def _headline(findings: Findings, confidence: float) -> str:
    parts = []
    for row in findings.rows:
        claimed = printed_claim(row["joint"])
        claimed += " claimed" * isfinite(row["joint"])
        parts.append(f"{row['case']}: ε ≥ {row['proved']:.2f} proved, {claimed} in the joint view")
    return "; ".join(parts) + f" (each with {100 * confidence:g} % confidence)."


def _is_claimed(row: Row) -> bool:
    return isfinite(row["joint"])


def _rates(findings: Findings) -> Curves:
    """Points as measured, and the line that mu-GDP allows; the diagonal is a guess by chance."""
    from niss.charts import Curves, Series, points
    from niss.methods import look_of
    from niss.methods.look import DOTTED, QUIET, Look

    rows = {row["case"]: row for row in findings.rows}
    series, chance = [], list[float]()
    for case, curve in findings.curves["rates"].items():
        look = look_of(rows[case]["method"], protected=_is_claimed(rows[case]))
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
    from niss.methods import look_of
    from niss.methods.look import INK, Look

    known = [row[key] for row in findings.rows for key in ("proved", "joint") if isfinite(row[key])]
    # Where a claim is missing, its mark stands beyond the largest value.
    nothing = _BEYOND * max(known)
    rows = []
    for row in findings.rows:
        proved, marginal, look = (
            row["proved"],
            row["marginal"],
            look_of(row["method"], protected=_is_claimed(row)),
        )
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
