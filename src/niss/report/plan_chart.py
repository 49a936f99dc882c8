"""The planner's trade-off: noise in the sum over the strength of the shares."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from niss.errors import ConfigError


def plan_figure(plan: Mapping[str, Any], path: Path) -> Path:
    """Draw the trade-off curve of a plan (the dictionary of `niss plan --json`) into a .png or .svg file."""
    if path.suffix not in (".png", ".svg"):
        raise ConfigError(f"unknown kind of picture {path.suffix!r}", field="--plot", hint="use .png or .svg")
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from niss.report.canvas import INK, QUIET, RULE, SERIES, STYLE, WIDTH

    curve = plan["curve"]
    kappas = [point["kappa"] for point in curve]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
        axes = figure.add_subplot()
        axes.loglog(
            kappas,
            [point["total"] for point in curve],
            color=SERIES[0],
            linewidth=2.2,
            label="NISS, all noise",
        )
        if plan["dropout_part"]:
            parts = (("residual", "by design", "--"), ("dropout", "left by dropped clients", ":"))
            for number, (part, name, style) in enumerate(parts, start=1):
                axes.loglog(
                    kappas,
                    [point[part] for point in curve],
                    color=SERIES[number],
                    linestyle=style,
                    label=name,
                )
        chosen = plan["aggregate_variance_ratio_to_central"]
        axes.plot(
            [plan["kappa"]],
            [chosen],
            "o",
            color=INK,
            label=f"the plan: {chosen:.3g} at kappa {plan['kappa']:.3g}",
        )
        local = chosen / plan["aggregate_variance_ratio_to_local"]
        for level, name in (
            (1.0, "trusted server: 1"),
            (plan["aggregate_variance_ratio_ideal"], "ideal secure aggregation"),
            (local, f"DP-FedAvg: {local:.3g}"),
        ):
            if name.startswith("ideal") and level < 1.02:
                continue
            axes.axhline(level, color=QUIET, linewidth=1.0, linestyle=(0, (4, 3)))
            axes.annotate(
                name,
                (kappas[-1], level),
                xytext=(0, -11 if level == 1.0 else 3),
                textcoords="offset points",
                ha="right",
                color=QUIET,
                fontsize=9,
            )
        axes.set_xlabel("Strength of the shares, kappa")
        axes.set_ylabel("Noise variance in the sum\n(trusted server = 1)")
        axes.grid(color=RULE, linewidth=0.7)
        axes.legend(fontsize=9)
        figure.savefig(path, dpi=160)
    return path
