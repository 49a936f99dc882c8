"""The planner's pictures: noise in the sum over the strength of the shares, and noise in the model over the rounds.

Stronger shares need less distortion, so less noise is left in the sum by design; where clients drop out, more of their
shares stays uncancelled. Unless kappa was given, the plan takes the least kappa that comes close to the lowest point
of the curve: stronger shares gain little and make every unforeseen dropout cost more.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from niss.methods.look import DOTTED, Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The method that leaves the noise of each curve over the rounds; no method reaches the best correlated noise.
CURVES = {"noise": "niss-carried", "noise_central": "central-dp", "noise_banded": "central-mf"}


def plan_figure(plan: Mapping[str, Any], path: Path) -> Path:
    """Draw the trade-off of a plan into a picture, and return where it is.

    plan  the dictionary that `niss plan --json` prints
    path  ends in .png or .svg; raises `ConfigError` for any other ending

    All variances are multiples of what a trusted server would add. Shown are the curve over kappa, its two parts
    where clients may drop out, the plan itself, and as lines the trusted server, ideal secure aggregation (where it
    needs noticeably more) and DP-FedAvg.
    """
    from niss.report.canvas import save_figure

    return save_figure(Path(path), lambda: _draw(plan), salt="niss-plan")


def carried_figure(plan: Mapping[str, Any], path: Path) -> Path:
    """Draw the noise in the model over the rounds of a plan with carried shares, beside that of trusted servers.

    plan  the dictionary that `niss plan --carry --json` prints
    path  as in `plan_figure`
    """
    from niss.report.canvas import save_figure

    return save_figure(Path(path), lambda: _draw_rounds(plan), salt="niss-carried")


def _draw_rounds(plan: Mapping[str, Any]) -> Figure:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from niss.methods import look_of
    from niss.report.canvas import INK, STYLE, WIDTH, rule

    final = plan["noise_central"][-1]
    names = {
        "noise_central": "trusted server, fresh noise",
        "noise": "carried shares, nobody trusted",
        "noise_banded": "trusted server, BandMF",
        "noise_best": "trusted server, best correlated noise",
    }
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 4.0), layout="constrained")
        axes = figure.add_subplot()
        for key, name in names.items():
            if plan[key] is None:
                continue
            look = look_of(CURVES[key]) if key in CURVES else Look(INK, "o", DOTTED)
            values = [value / final for value in plan[key]]
            rounds = range(1, len(values) + 1)
            marker = look.marker if len(values) == 1 else None
            axes.plot(
                rounds,
                values,
                color=look.colour,
                linestyle=look.line,
                linewidth=2.0,
                marker=marker,
                label=name,
            )
        axes.set_xlabel("Round")
        axes.set_ylabel("Noise variance in the model\n(trusted server, fresh noise, at the end = 1)")
        axes.set_ylim(bottom=0.0)
        axes.margins(x=0.01)
        rule(axes, "y")
        axes.legend(fontsize=9)
    return figure


def _draw(plan: Mapping[str, Any]) -> Figure:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from niss.report.canvas import INK, RULE, SERIES, STYLE, WIDTH

    curve, kappa = plan["curve"], plan["kappa"]
    kappas = [point["kappa"] for point in curve]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
        axes = figure.add_subplot()
        totals = [point["total"] for point in curve]
        axes.loglog(kappas, totals, color=SERIES[0], linewidth=2.2, label="NISS, all noise")
        if plan["dropout_part"]:
            parts = (("residual", "by design", "--"), ("dropout", "left by dropped clients", ":"))
            for number, (part, name, style) in enumerate(parts, start=1):
                values = [point[part] for point in curve]
                axes.loglog(kappas, values, color=SERIES[number], linestyle=style, label=name)
        chosen = plan["aggregate_variance_ratio_to_central"]
        name = f"the plan: {chosen:.3g} at kappa {kappa:.3g}"
        axes.plot([kappa], [chosen], "o", color=INK, label=name)
        _mark_level(axes, 1.0, "trusted server: 1", right=kappas[-1], below=True)
        ideal = plan["aggregate_variance_ratio_ideal"]
        if ideal >= 1.02:
            _mark_level(axes, ideal, "ideal secure aggregation", right=kappas[-1])
        local = chosen / plan["aggregate_variance_ratio_to_local"]
        _mark_level(axes, local, f"DP-FedAvg: {local:.3g}", right=kappas[-1])
        axes.set_xlabel("Strength of the shares, kappa")
        axes.set_ylabel("Noise variance in the sum\n(trusted server = 1)")
        axes.grid(color=RULE, linewidth=0.7)
        axes.legend(fontsize=9)
    return figure


def _mark_level(axes: Axes, level: float, name: str, *, right: float, below: bool = False) -> None:
    """A dashed line across the chart, named at its right end, above the line or below it."""
    from niss.report.canvas import QUIET

    axes.axhline(level, color=QUIET, linewidth=1.0, linestyle=(0, (4, 3)))
    place: dict[str, Any] = {"xytext": (0, -11 if below else 3), "textcoords": "offset points", "ha": "right"}
    axes.annotate(name, (right, level), color=QUIET, fontsize=9, **place)
