"""What is left of the charged noise after each story, with the rule off and on: the figure of `fake-dropout`."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from niss.attacks.drawing import INK, RULE, SERIES, STYLE, new_figure
from niss.attacks.findings import Findings


def draw_stories(findings: Findings) -> Figure | None:
    """One pair of bars per story; below 1 the client has less than it was charged for."""
    if not findings.rows:
        return None
    stories = list(dict.fromkeys(row["story"] for row in findings.rows))
    left = {(row["story"], row["rule"]): row for row in findings.rows}
    with mpl.rc_context(STYLE):
        figure = new_figure(3.6)
        axes = figure.subplots()
        places = np.arange(len(stories))
        for number, (rule, hatch) in enumerate((("off", "//"), ("on", ""))):
            known = [left.get((story, rule)) for story in stories]
            heights = [row["left"] if row else 0.0 for row in known]
            bars = axes.bar(
                places + 0.4 * (number - 0.5),
                heights,
                width=0.36,
                color=SERIES[1 - number],
                hatch=hatch,
                edgecolor="white",
                label=f"rule {rule}",
            )
            axes.bar_label(
                bars,
                [f"{row['left']:.2f}\nε {row['epsilon']:.1f}" if row else "" for row in known],
                fontsize=9.5,
                padding=2,
            )
        axes.axhline(1.0, color=INK, linewidth=1.3, linestyle="--", label="charged")
        axes.set_xticks(places, [f"“{story}”" for story in stories])
        axes.set_xlabel("What the server tells the victim's neighbours")
        axes.set_ylabel("Noise variance left ÷ charged")
        axes.set_ylim(0.0, 1.45 * max(1.0, *(row["left"] for row in findings.rows)))
        axes.grid(axis="y", color=RULE, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.legend(loc="upper left", ncols=3, title="One verdict a round", alignment="left")
    return figure
