"""The ledger over the rounds: epsilon spent, below the line that was promised.

`spending_figure` is the page's, a panel for each method with all of its clients; `save_ledger_chart` is that of
`niss account --plot`, narrower, with the worst-off and the median client alone. Both draw steps, since what is spent
jumps when a round is charged, and both print epsilons rounded up: a chart must not promise more than the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from niss.accounting import LedgerFile
from niss.claims import rounded_up
from niss.figures import CHART_STYLE, WIDTH, short
from niss.figures import grid as rule
from niss.methods.look import INK, QUIET, SERIES
from niss.report.canvas import Reading, bands_svg, in_two_widths, inline_svg, save_figure
from niss.report.ledger import ClientRow, Spending, client_rows, read_spending, spending
from niss.runs.folder import ReportInput

# Narrower than the page's figures, so that the letters are still read when it takes half a column.
_CHART_WIDTH = 4.8
_PANEL_HEIGHT = 2.9
_COLUMNS = 2
# A panel is narrower than the chart of accuracies, and there may be many of them.
_MOST_BANDS = 40
_SMALL_PANEL_HEIGHT = 2.3
_DASHED = (0, (4, 2))
_DOTTED = (0, (1.4, 1.2))


def spending_figures(
    report: ReportInput, notes: list[str], *, prefix: str = "spending"
) -> dict[str, Markup] | None:
    """Inline SVG in two widths: epsilon of the clients over the rounds; None where no ledger holds a finite one.

    notes   a ledger that cannot be trusted is left out and named here
    prefix  goes before every id in it, to keep figures on one page apart
    """
    spendings = read_spending(report, notes)
    if not spendings:
        return None
    return in_two_widths(lambda width, name: _spending_figure(spendings, width, name), prefix)


def _spending_figure(spendings: list[Spending], width: float, prefix: str) -> Markup:
    ends = [
        f"{one.label}: the worst-off client spent {rounded_up(float(one.most[-1]))}, "
        f"the median client {rounded_up(float(one.median[-1]))}"
        + ("" if one.budget is None else f", of a budget of {rounded_up(one.budget)}")
        for one in spendings
    ]
    figure = _draw_spending(spendings, width)
    overlay = Markup("").join(
        bands_svg(figure, _readings(one), axes, _MOST_BANDS)
        for one, axes in zip(spendings, figure.axes, strict=False)
    )
    return inline_svg(
        figure,
        salt="niss-spending",
        prefix=prefix,
        title="Privacy loss of the clients by round",
        description=f"Step charts of epsilon spent by round, one for each method. {'; '.join(ends)}.",
        overlay=overlay,
    )


def _readings(one: Spending) -> dict[int, list[Reading]]:
    """What is shown under the pointer: the worst-off and the median client after each round."""
    return {
        number: [
            Reading(f"{rounded_up(most)}  worst-off client", SERIES[1], most),
            Reading(f"{rounded_up(median)}  median client", SERIES[0], median),
        ]
        for number, most, median in zip(one.rounds, one.most.tolist(), one.median.tolist(), strict=True)
    }


def _draw_spending(spendings: list[Spending], width: float = WIDTH) -> Figure:
    """Panels in two columns, or one on a phone, all on the same axes so that methods can be compared."""
    columns = min(_COLUMNS if width == WIDTH else 1, len(spendings))
    rows = -(-len(spendings) // columns)
    highest = max(max(float(one.most[-1]), one.budget or 0.0) for one in spendings)
    last = max(one.rounds[-1] for one in spendings)
    with mpl.rc_context(CHART_STYLE):
        height = _SMALL_PANEL_HEIGHT * rows + (0.75 if width == WIDTH else 0.98)
        figure = Figure(figsize=(width, height))
        grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        figure.subplots_adjust(
            left=0.63 / width,
            right=0.98,
            top=1 - (0.62 if width == WIDTH else 0.85) / height,
            bottom=0.5 / height,
            hspace=0.28,
            wspace=0.08,
        )
        for place, axes in enumerate(grid.flat):
            if place >= len(spendings):
                axes.set_visible(False)
                continue
            axes.set(xlim=(0, last), ylim=(0, 1.12 * highest or 1.0))
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
            axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
            rule(axes, "y")
            # With an odd number of panels the one above the gap carries the numbers of the axis.
            if place + columns >= len(spendings):
                axes.set_xlabel("Round")
                axes.tick_params(labelbottom=True)
            if place % columns == 0:
                axes.set_ylabel("ε spent")
            _draw_clients(axes, spendings[place])
        keys = _keys(any(one.lines for one in spendings), any(not one.lines for one in spendings))
        spacing = {"borderaxespad": 0.2, "columnspacing": 1.4, "handlelength": 1.8}
        figure.legend(
            handles=keys,
            loc="upper left",
            bbox_to_anchor=(0.555 / width, 1.0),
            ncols=5 if width == WIDTH else 2,
            fontsize=9,
            **spacing,
        )
    return figure


def _draw_clients(axes: Axes, one: Spending) -> None:
    """All clients of one method, with the median and the worst-off on top.

    Few clients have a line each; of many the spread between least and most is filled. Here median and most are taken
    in each round by itself, so they need not follow one client.
    """
    rounds = np.asarray(one.rounds, dtype=np.float64)
    title = f"{short(one.label)}: ε {rounded_up(float(one.most[-1]))} spent at most"
    axes.set_title(title, loc="left", fontsize=9.5, parse_math=False)
    if one.lines:
        for line in one.lines:
            axes.step(rounds, line, where="post", color=QUIET, linewidth=0.5, alpha=0.7)
    else:
        axes.fill_between(
            rounds, one.least, one.most, step="post", color=SERIES[0], alpha=0.18, linewidth=0.0
        )
    axes.step(rounds, one.median, where="post", color=SERIES[0], linewidth=1.6, linestyle=_DOTTED)
    axes.step(rounds, one.most, where="post", color=SERIES[1], linewidth=1.6, clip_on=False)
    if one.budget is not None:
        axes.axhline(one.budget, color=INK, linestyle=_DASHED, linewidth=1.2)


def _keys(lines: bool, spread: bool) -> list[Line2D | Patch]:
    """The legend above all panels; `lines` and `spread` say which of the two ways of drawing clients occurs."""
    keys: list[Line2D | Patch] = [
        Line2D([], [], color=INK, linestyle=_DASHED, linewidth=1.2, label="budget"),
        Line2D([], [], color=SERIES[1], linewidth=1.6, label="worst-off client"),
        Line2D([], [], color=SERIES[0], linewidth=1.6, linestyle=_DOTTED, label="median client"),
    ]
    if lines:
        keys.append(Line2D([], [], color=QUIET, linewidth=0.7, label="each client"))
    if spread:
        keys.append(Patch(facecolor=SERIES[0], alpha=0.18, label="all clients"))
    return keys


def save_ledger_chart(path: Path, ledgers: Sequence[tuple[str, LedgerFile]]) -> Path:
    """Draw ledgers into a picture, and return where it is.

    path     ends in .png or .svg; raises `ConfigError` for any other ending
    ledgers  each with the label of its panel
    """
    return save_figure(Path(path), lambda: draw_ledgers(ledgers), salt="niss-ledger")


def draw_ledgers(ledgers: Sequence[tuple[str, LedgerFile]]) -> Figure:
    """One panel for each (label, ledger), on a common axis of rounds."""
    panels = [(label, ledger, client_rows(ledger)) for label, ledger in ledgers]
    heights = [_PANEL_HEIGHT if _has_curve(rows) else _PANEL_HEIGHT / 3 for _, _, rows in panels]
    last = max((entry.round for _, ledger in ledgers for entry in ledger.entries), default=0)
    with mpl.rc_context({**CHART_STYLE, "font.size": 10.5}):
        figure = Figure(figsize=(_CHART_WIDTH, sum(heights) + 0.4), layout="constrained")
        rows_of_axes = figure.subplots(
            len(panels), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights}
        )
        for axes, (label, ledger, rows) in zip(rows_of_axes[:, 0], panels, strict=True):
            # Half a round more, so that the step of the last round is seen.
            axes.set_xlim(0, max(last, 1) + 0.5)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
            _draw_ledger(axes, label, ledger, rows)
        rows_of_axes[-1, 0].set_xlabel("Round")
    return figure


def _has_curve(rows: Sequence[ClientRow]) -> bool:
    """Whether the worst-off client, the first, has spent a finite epsilon."""
    return bool(rows) and rows[0].participations > 0 and rows[0].epsilon_spent is not None


def _draw_ledger(axes: Axes, label: str, ledger: LedgerFile, rows: Sequence[ClientRow]) -> None:
    """One panel: two clients and the claim of the worst-off, or the reason why there is nothing to draw.

    The median client is the one in the middle of `rows`, which are sorted, so both curves are those of real clients.
    """
    title = short(label, 40)
    if not _has_curve(rows):
        axes.set_title(title, loc="left", fontsize=10.5, parse_math=False)
        text = "no finite ε: no guarantee" if ledger.entries else "nothing charged yet"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center")
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        return
    worst, median = rows[0], rows[len(rows) // 2]
    axes.set_ylabel(f"ε spent (δ = {ledger.header.delta:g})")
    rule(axes, "y")
    for row, name, colour, style in (
        (worst, "worst-off", SERIES[1], "-"),
        (median, "median", SERIES[0], _DOTTED),
    ):
        steps = spending(ledger, row.client)
        rounds = [0.0, *(step[0] for step in steps), axes.get_xlim()[1]]
        values = [0.0, *(step[3] or 0.0 for step in steps), row.epsilon_spent or 0.0]
        key = f"{name} (client {short(row.client, 12)}): ε {rounded_up(values[-1])} spent"
        axes.step(rounds, values, where="post", color=colour, linestyle=style, linewidth=2.0, label=key)
    if worst.epsilon_claim is not None:
        key = f"claim for client {short(worst.client, 12)}: ε {rounded_up(worst.epsilon_claim)}"
        axes.axhline(worst.epsilon_claim, color=INK, linestyle=_DASHED, linewidth=1.3, label=key)
    axes.set_ylim(0, 1.08 * max(worst.epsilon_spent or 0.0, worst.epsilon_claim or 0.0) or 1.0)
    # Above the axes the names cover no curve.
    above: dict[str, Any] = {"bbox_to_anchor": (0.0, 1.0), "borderpad": 0.0}
    legend = axes.legend(title=title, loc="lower left", alignment="left", fontsize=9.5, **above)
    legend.get_title().set_parse_math(False)
