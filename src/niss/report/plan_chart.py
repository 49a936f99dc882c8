"""The planner's pictures: noise in the sum over the strength of the shares, and noise in the model over the rounds.

Stronger shares need less distortion, so less noise is left in the sum by design; where clients drop out, more of their
shares stays uncancelled. Unless kappa was given, the plan takes the least kappa that comes close to the lowest point
of the curve: stronger shares gain little and make every unforeseen dropout cost more.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from niss.charts import Chart, Curves, Series, numbered, points
from niss.methods.look import DOTTED, INK, Look

# The method that leaves the noise of each curve over the rounds; no method reaches the best correlated noise.
CURVES = {"noise": "niss-carried", "noise_central": "central-dp", "noise_banded": "central-mf"}
_NAMES = {
    "noise_central": "trusted server, fresh noise",
    "noise": "carried shares, nobody trusted",
    "noise_banded": "trusted server, BandMF",
    "noise_best": "trusted server, best correlated noise",
}
# Where ideal secure aggregation needs hardly more than a trusted server, their lines would lie on each other.
_NOTICEABLY_MORE = 1.02


def plan_figure(plan: Mapping[str, Any], path: Path) -> Path:
    """Draw the trade-off of a plan into a picture, and return where it is.

    plan  the dictionary that `niss plan --json` prints
    path  ends in .png or .svg; raises `ConfigError` for any other ending
    """
    return _saved(kappa_chart(plan), path, salt="niss-plan")


def carried_figure(plan: Mapping[str, Any], path: Path) -> Path:
    """Draw the noise in the model over the rounds of a plan with carried shares, beside that of trusted servers.

    plan  the dictionary that `niss plan --carry --json` prints
    path  as in `plan_figure`
    """
    return _saved(rounds_chart(plan), path, salt="niss-carried")


def _saved(chart: Chart, path: Path, *, salt: str) -> Path:
    from niss.figures import draw_chart
    from niss.report.canvas import save_figure

    return save_figure(Path(path), lambda: draw_chart(chart), salt=salt)


def rounds_chart(plan: Mapping[str, Any]) -> Curves:
    """The variance in the model after each round, as a part of what a trusted server leaves in the end."""
    from niss.methods import look_of

    final = plan["noise_central"][-1]
    series = []
    for key, name in _NAMES.items():
        if plan[key] is not None:
            look = look_of(CURVES[key]) if key in CURVES else Look(INK, "o", DOTTED)
            values = [value / final for value in plan[key]]
            found = points(range(1, len(values) + 1), values)
            series.append(Series(name, look, found, marks=len(values) == 1))
    up = "Noise variance in the model\n(trusted server, fresh noise, at the end = 1)"
    return Curves(title="Noise in the model", across="Round", up=up, series=series, head="Round", least=0.0)


def kappa_chart(plan: Mapping[str, Any]) -> Curves:
    """The variance in the sum over kappa, as multiples of what a trusted server would add.

    Shown are the curve, its two parts where clients may drop out, the plan itself, and as lines the trusted server,
    ideal secure aggregation (where it needs noticeably more) and DP-FedAvg.
    """
    curve, kappa, chosen = plan["curve"], plan["kappa"], plan["aggregate_variance_ratio_to_central"]
    parts = {"total": "NISS, all noise"}
    if plan["dropout_part"]:
        parts |= {"residual": "by design", "dropout": "left by dropped clients"}
    kappas = [point["kappa"] for point in curve]
    series = [
        Series(name, numbered(number), points(kappas, [point[part] for point in curve], "xy"))
        for number, (part, name) in enumerate(parts.items())
    ]
    name = f"the plan: {chosen:.3g} at kappa {kappa:.3g}"
    series.append(Series(name, Look(INK, "o"), points([kappa], [chosen], "xy"), line=False))
    ideal, local = plan["aggregate_variance_ratio_ideal"], chosen / plan["aggregate_variance_ratio_to_local"]
    levels = {"trusted server: 1": 1.0, f"DP-FedAvg: {local:.3g}": local}
    if ideal >= _NOTICEABLY_MORE:
        levels["ideal secure aggregation"] = ideal
    return Curves(
        title="Noise over the strength of the shares",
        across="Strength of the shares, kappa",
        up="Noise variance in the sum\n(trusted server = 1)",
        series=series,
        log="xy",
        levels=levels,
        head="kappa",
    )
