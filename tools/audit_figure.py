"""Draw the audit: how well the best attack tells a canary's presence, against what was promised.

Usage: python tools/audit_figure.py [--out docs/images/audit.png]
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from scipy import stats

from niss.accounting import Plan
from niss.figures import STYLE as COMMON
from niss.figures import png
from niss.files import write_output
from niss.mechanism import gdp_epsilon
from niss.methods.look import BLUE, INK, QUIET, RULE, VERMILION
from niss.randomness import SimStream

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.audit import Audit, Scores, epsilon_bound, mu_interval  # noqa: E402

# Okabe and Ito: blue for the joint claim, vermilion for the paper's, ink for what was measured.
JOINT, MARGINAL = BLUE, VERMILION
STYLE = {
    **COMMON,
    "font.size": 12,
    "legend.frameon": True,
    "legend.edgecolor": "white",
    "legend.framealpha": 1.0,
}
CLIENTS, TRIALS, FALSE_ALARM = 12, 1_000_000, 1e-6
PLAN = Plan(epsilon=3.0, delta=1e-5, graph="complete")


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the audit of the joint view.")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "audit.png")
    out = parser.parse_args().out
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 5.4), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        draw(left, "NISS, calibrated for the joint view", Audit.of_plan(PLAN, CLIENTS))
        draw(right, "The paper's choice, τ = 0", Audit.of_plan(replace(PLAN, tau2=0.0), CLIENTS))
        left.set_ylabel("Canary found")
        FigureCanvasAgg(figure)
    # The dark one changes the figure, so it comes second.
    for path, dark in ((out, False), (out.with_stem(f"{out.stem}-dark"), True)):
        print(write_output(path, png(figure, style=STYLE, dark=dark)))


def draw(axes: Axes, title: str, audit: Audit) -> None:
    """True positives over false positives: measured, and the most that each claim allows."""
    scores = audit.scores(TRIALS, SimStream(80))
    alarms, marks = np.linspace(0.0, 1.0, 401), np.linspace(0.0, 1.0, 21)
    axes.plot(alarms, alarms, color=QUIET, linewidth=1.2, linestyle=(0, (1, 2)))
    axes.text(0.57, 0.51, "guessing", color=QUIET, rotation=39, ha="center", va="center")
    for mu, name, colour, style in (
        (audit.claimed_mu, "joint claim", JOINT, "-"),
        (audit.marginal_mu, "marginal claim (paper)", MARGINAL, (0, (5, 1.6))),
    ):
        epsilon = gdp_epsilon(mu, PLAN.delta)
        label = f"{name}: ε = {epsilon:.1f}" if np.isfinite(epsilon) else f"{name}: no guarantee"
        axes.plot(alarms, allowed(alarms, mu), color=colour, linewidth=3, linestyle=style, label=label)
    found = measured(scores, marks)
    axes.plot(
        marks, found, "o", color=INK, markersize=7, clip_on=False, zorder=5, label=finding(audit, scores)
    )
    axes.set(xlim=(0, 1), ylim=(0, 1.03), xlabel="False alarms")
    axes.set_title(title, pad=12)
    axes.grid(color=RULE, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), handlelength=1.6, title="ε at δ = 10⁻⁵")


def finding(audit: Audit, scores: Scores) -> str:
    """What the attack measured, in words."""
    if np.isinf(audit.claimed_mu):
        return f"best attack: ε ≥ {epsilon_bound(scores, PLAN.delta, FALSE_ALARM):.1f}"
    low, mu, high = mu_interval(scores, FALSE_ALARM)
    print(f"claimed mu {audit.claimed_mu:.4f}, measured {mu:.4f} (between {low:.4f} and {high:.4f})")
    return f"best attack: ε ≈ {gdp_epsilon(mu, PLAN.delta):.1f}"


def allowed(alarms: np.ndarray, mu: float) -> np.ndarray:
    """The most true positives that mu-GDP allows at each rate of false alarms."""
    return np.ones_like(alarms) if np.isinf(mu) else stats.norm.cdf(stats.norm.ppf(alarms) + mu)


def measured(scores: Scores, alarms: np.ndarray) -> np.ndarray:
    """True positives above the thresholds that give these rates of false alarms."""
    thresholds = np.quantile(scores.without, 1.0 - alarms)
    thresholds[alarms == 1.0] = -np.inf
    return np.array([np.mean(scores.present > threshold) for threshold in thresholds])


if __name__ == "__main__":
    main()
