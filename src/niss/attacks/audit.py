"""`niss attack audit`: canaries over many rounds, and the epsilon they prove beside the one that is claimed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from niss.attacks.experiment import (
    Clients,
    Delta,
    Epsilon,
    Experiment,
    Findings,
    Help,
    Neighbours,
    Progress,
    Seed,
    check_at_least,
)
from niss.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from niss.accounting import RoundPlan
    from niss.attacks.rounds import Setting


@dataclass(frozen=True, kw_only=True)
class AuditExperiment(Experiment):
    """NISS calibrated, NISS as printed (tau = 0) and DP-FedAvg, each with canaries in half of its rounds."""

    name: ClassVar[str] = "audit"
    summary: ClassVar[str] = (
        "Canary audit: a lower bound on epsilon from true- and false-positive rates, beside what is claimed."
    )
    examples: ClassVar[tuple[str, ...]] = (
        "niss attack audit --rounds 100000 --out runs/audit",
        "niss attack audit --json",
    )
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
    epsilon: Epsilon = None
    delta: Delta = None
    rounds: Annotated[int, Help("Rounds with the canary, and as many without.")] = 100_000
    dimension: Annotated[int, Help("Coordinates of the canary.")] = 8
    confidence: Annotated[float, Help("Of each lower bound.")] = 0.95
    seed: Seed = 1

    def check(self) -> None:
        """Refuse what cannot be used."""
        from niss.randomness import SimStream

        if self.rounds < 100:
            raise ConfigError(
                f"must be at least 100, not {self.rounds}",
                field="--rounds",
                hint="few rounds prove little: 100000 is a good number",
            )
        check_at_least(1, dimension=self.dimension)
        if not 0.5 <= self.confidence < 1.0:
            raise ConfigError(
                f"must be at least 0.5 and below 1, not {self.confidence!r}", field="--confidence"
            )
        SimStream(self.seed)
        for setting in self._cases().values():
            self._round(setting)

    def _cases(self) -> dict[str, Setting]:
        from niss.attacks.rounds import make_setting

        setting = make_setting(
            "default",
            clients=self.clients,
            epsilon=self.epsilon,
            delta=self.delta,
            neighbours=self.neighbours,
        )
        return {
            "niss, calibrated τ²": setting,
            "niss, τ = 0": setting.with_plan(tau2=0.0),
            "dp-fedavg": setting.with_plan(method="dp-fedavg"),
        }

    def _round(self, setting: Setting) -> RoundPlan:
        import numpy as np

        return setting.plan.for_round(
            np.arange(self.clients),
            weights=np.full(self.clients, 1.0 / self.clients),
            records=np.ones(self.clients),
            beacon=b"audit",
        )

    def run(self, findings: Findings, progress: Progress) -> None:
        """Score canaries in every case, and bound epsilon from below."""
        import numpy as np

        from niss.attacks.canary import canary_scores, epsilon_bound, rates
        from niss.mechanism import gdp_epsilon
        from niss.randomness import SimStream

        stream = SimStream(self.seed)
        for name, setting in self._cases().items():
            plan = self._round(setting)
            # The worst protected client; where nobody is protected, the first.
            victim = int(np.argmax(plan.joint_mu))
            mu, delta = float(plan.joint_mu[victim]), setting.plan.delta

            def report(done: int, total: int, name: str = name) -> None:
                progress(name, done, total, "")

            scores = canary_scores(
                plan,
                victim,
                share=np.full(self.clients, 1.0 / self.clients),
                dimension=self.dimension,
                rounds=self.rounds,
                stream=stream.child(name),
                progress=report,
            )
            bound = epsilon_bound(scores, delta, self.confidence)
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
            findings.curves.setdefault("rates", {})[name] = rates(scores, mu)
        findings.headline = _headline(findings, self.confidence)
        findings.finished = True

    def draw(self, findings: Findings) -> Figure | None:
        """Left: true- over false-positive rates beside what the claim allows; right: claims and proof per case."""
        from niss.attacks import drawing

        if not findings.rows:
            return None
        with drawing.style():
            figure = drawing.new_figure(3.9)
            left, right = figure.subplots(1, 2)
            _draw_rates(left, findings)
            _draw_claims(right, findings)
        return figure


def _verdict(proved: float, joint: float, marginal: float) -> str:
    if proved > joint:
        return "the joint claim is refuted"
    if proved > marginal:
        return "the marginal claim is refuted"
    return "consistent with the claims"


def _headline(findings: Findings, confidence: float) -> str:
    parts = []
    for row in findings.rows:
        claimed = f"{row['joint']:.2f}" if math.isfinite(row["joint"]) else "none"
        parts.append(f"{row['case']}: ε ≥ {row['proved']:.2f} proved, {claimed} claimed in the joint view")
    return "; ".join(parts) + f" (each with {100 * confidence:g} % confidence)."


def _draw_rates(axes: Axes, findings: Findings) -> None:
    from niss.attacks import drawing

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


def _draw_claims(axes: Axes, findings: Findings) -> None:
    from niss.attacks import drawing

    rows = findings.rows
    blue, red, light = drawing.SERIES[0], drawing.SERIES[1], drawing.SERIES[5]
    places = list(range(len(rows)))[::-1]
    most = max(
        [row["proved"] for row in rows] + [row["joint"] for row in rows if math.isfinite(row["joint"])]
    )
    edge = 1.25 * most
    axes.barh(places, [row["proved"] for row in rows], height=0.42, color=light, label="proved at least")
    for place, row in zip(places, rows, strict=True):
        finite = math.isfinite(row["joint"])
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
