"""`niss attack audit`: canaries over many rounds, and the epsilon they prove beside the one that is claimed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Annotated, ClassVar

from niss import attacks
from niss.attacks.experiment import Clients, Experiment, Findings, Help, Neighbours, Progress, Row
from niss.claims import printed_claim
from niss.errors import ConfigError

if TYPE_CHECKING:
    from niss.accounting import RoundPlan


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

    def setting(self) -> attacks.Setting:
        """The plan with so many neighbours."""
        return self.make_setting(neighbours=self.neighbours)

    def _cases(self) -> dict[str, attacks.Setting]:
        setting = self.setting()
        return {
            "niss, calibrated τ²": setting,
            "niss, τ = 0": setting.with_plan(tau2=0.0),
            "dp-fedavg": setting.with_plan(method="dp-fedavg"),
        }

    def _round(self, setting: attacks.Setting) -> RoundPlan:
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

    def draw(self, findings: Findings) -> attacks.drawing.Figure | None:
        """Above: canaries found over false alarms, and what the claim allows; below: claims and proof per case."""
        drawing = attacks.drawing
        if not findings.rows:
            return None
        with drawing.style():
            figure = drawing.new_figure(7.0)
            above, below = figure.subplots(2, 1, height_ratios=(4.0, 3.0))
            _draw_rates(above, findings)
            _draw_claims(below, findings)
        return figure


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


def _draw_rates(axes: attacks.drawing.Axes, findings: Findings) -> None:
    """Points as measured, and the line that mu-GDP allows; the diagonal is a guess by chance."""
    drawing = attacks.drawing
    rows = {row["case"]: row for row in findings.rows}
    for number, (name, curve) in enumerate(findings.curves["rates"].items()):
        x, options = (
            curve["false_positive"],
            drawing.method_line(rows[name]["method"], _is_claimed(rows[name])),
        )
        axes.plot(x, curve["most"], **options | {"marker": ""})
        axes.plot(
            x,
            curve["true_positive"],
            **options | {"linestyle": "none"},
            markevery=(2 * number, 6),
            label=name,
        )
    axes.plot(x, x, color=drawing.QUIET, linewidth=1.0, linestyle=":")
    axes.text(x[-1] / 30, x[-1] / 60, "guessing", color=drawing.QUIET, fontsize=11)
    drawing.label_axes(axes, "False alarms", "Canaries found", log="xy")
    axes.set_ylim(bottom=2e-4, top=2.0)
    axes.legend(
        loc="lower right", title="points: measured; lines: the most that the claim allows", title_fontsize=10
    )


def _is_claimed(row: Row) -> bool:
    return isfinite(row["joint"])


def _draw_claims(axes: attacks.drawing.Axes, findings: Findings) -> None:
    """A bar for what is proved, with marks where the claims are; a mark in the grey part stands for no claim."""
    drawing = attacks.drawing
    rows = findings.rows
    places = list(range(len(rows)))[::-1]
    most = max([row["proved"] for row in rows] + [row["joint"] for row in rows if _is_claimed(row)])
    nothing, edge = 1.22 * most, 1.4 * most
    axes.axvspan(1.06 * most, edge, color=drawing.QUIET, alpha=0.12, linewidth=0)
    for place, row in zip(places, rows, strict=True):
        look = drawing.look_of(row["method"], protected=_is_claimed(row))
        axes.barh([place], [row["proved"]], height=0.5, color=look.colour, alpha=0.45)
        axes.text(0.08, place + 0.3, f"at least {row['proved']:.2f}", fontsize=10)
        joint = row["joint"] if _is_claimed(row) else nothing
        for at, face, size in ((row["marginal"], "white", 11.0), (joint, drawing.INK, 7.5)):
            axes.plot(
                [at], [place], "D", color=drawing.INK, markerfacecolor=face, markersize=size, clip_on=False
            )
    for face, size, words in (
        (drawing.INK, 7.5, "claimed, joint view"),
        ("white", 10.0, "claimed, marginal view"),
    ):
        axes.plot([], [], "D", color=drawing.INK, markerfacecolor=face, markersize=size, label=words)
    axes.bar([0], [0], color=drawing.QUIET, alpha=0.45, label="proved by the audit")
    axes.set_xlim(0.0, edge)
    axes.set_ylim(-0.6, len(rows) - 0.3)
    axes.set_yticks(places, [row["case"].replace(", ", ",\n") for row in rows])
    ticks = list(range(0, int(most) + 1, max(1, int(most) // 4)))
    axes.set_xticks([*ticks, nothing], [*map(str, ticks), "no\nguarantee"])
    axes.set_xlabel("ε at the plan's δ")
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, 1.22), ncols=3, fontsize=10, columnspacing=1.0)
    drawing.grid(axes, "x")
