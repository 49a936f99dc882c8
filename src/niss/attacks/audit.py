"""`niss attack audit`: canaries over many rounds, and the epsilon they prove beside the one that is claimed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Annotated, ClassVar

from niss import attacks
from niss.attacks.experiment import Clients, Experiment, Findings, Help, Neighbours, Progress
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
        """Left: true- over false-positive rates beside what the claim allows; right: claims and proof per case."""
        drawing = attacks.drawing
        if not findings.rows:
            return None
        with drawing.style():
            figure = drawing.new_figure(3.9)
            left, right = figure.subplots(1, 2)
            _draw_rates(left, findings)
            _draw_claims(right, findings)
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
    for number, (name, curve) in enumerate(findings.curves["rates"].items()):
        x = curve["false_positive"]
        color = drawing.SERIES[number]
        axes.plot(x, curve["most"], color=color, linestyle=drawing.LINES[number], linewidth=1.6)
        axes.plot(
            x,
            curve["true_positive"],
            linestyle="none",
            color=color,
            marker=drawing.MARKERS[number],
            markersize=4.5,
            markevery=(2 * number, 6),
            label=name,
        )
    axes.plot(x, x, color=drawing.INK, linewidth=0.8, linestyle=":")
    drawing.label_axes(axes, "False-positive rate", "True-positive rate", log="xy")
    axes.set_ylim(bottom=1e-4, top=1.6)
    axes.legend(fontsize=9, title="points: measured\nlines: most the claim allows", title_fontsize=9)


def _draw_claims(axes: attacks.drawing.Axes, findings: Findings) -> None:
    """A bar for what is proved, with marks where the claims are; an arrow at the edge is no claim at all."""
    drawing = attacks.drawing
    rows = findings.rows
    blue, red, light = drawing.SERIES[0], drawing.SERIES[1], drawing.SERIES[5]
    places = list(range(len(rows)))[::-1]
    most = max([row["proved"] for row in rows] + [row["joint"] for row in rows if isfinite(row["joint"])])
    edge = 1.25 * most
    axes.barh(places, [row["proved"] for row in rows], height=0.42, color=light, label="proved at least")
    for place, row in zip(places, rows, strict=True):
        finite = isfinite(row["joint"])
        axes.plot(
            [row["joint"] if finite else edge],
            [place],
            marker="D" if finite else ">",
            color=blue,
            markersize=8,
            linestyle="none",
            clip_on=False,
        )
        axes.plot([row["marginal"]], [place], marker="|", color=red, markersize=22, markeredgewidth=3)
    axes.plot([], [], "D", color=blue, label="joint claim (▸: none)")
    axes.plot([], [], "|", color=red, markersize=12, markeredgewidth=3, label="marginal claim (paper)")
    axes.set_xlim(0.0, edge)
    axes.set_ylim(-1.3, len(rows) - 0.4)
    axes.set_yticks(places, [row["case"].replace(", ", ",\n") for row in rows])
    axes.set_xlabel("ε at the plan's δ")
    axes.legend(loc="lower right", fontsize=9)
    drawing.grid(axes, "x")
