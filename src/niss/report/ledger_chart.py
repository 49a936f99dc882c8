"""The ledger over rounds: what the worst-off and the median client spent, below the line they were promised."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from niss.accounting.ledger_file import LedgerFile
from niss.errors import ConfigError
from niss.report.canvas import INK, RULE, SERIES, STYLE, as_png, as_svg, short
from niss.report.files import write_atomically
from niss.report.ledger_rows import ClientRow, client_rows, rounded_up, spending

# Narrower than the page's figures, so that the letters are still read when it takes half a column.
CHART_WIDTH = 4.8
PANEL_HEIGHT = 2.9


def draw_ledgers(ledgers: Sequence[tuple[str, LedgerFile]]) -> Figure:
    """One panel for each (label, ledger), on a common axis of rounds."""
    panels = [(label, ledger, client_rows(ledger)) for label, ledger in ledgers]
    heights = [PANEL_HEIGHT if _has_curve(rows) else PANEL_HEIGHT / 3 for _, _, rows in panels]
    last = max((entry.round for _, ledger in ledgers for entry in ledger.entries), default=0)
    with mpl.rc_context({**STYLE, "font.size": 10.5}):
        figure = Figure(figsize=(CHART_WIDTH, sum(heights) + 0.4), layout="constrained")
        rows_of_axes = figure.subplots(
            len(panels), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights}
        )
        for axes, (label, ledger, rows) in zip(rows_of_axes[:, 0], panels, strict=True):
            # Half a round more, so that the step of the last round is seen.
            axes.set_xlim(0, max(last, 1) + 0.5)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
            _panel(axes, label, ledger, rows)
        rows_of_axes[-1, 0].set_xlabel("Round")
    return figure


def save_ledger_chart(path: Path, ledgers: Sequence[tuple[str, LedgerFile]]) -> Path:
    """Draw the ledgers into a PNG or SVG file, by its extension."""
    path = Path(path)
    kind = path.suffix.lower()
    if kind not in (".png", ".svg"):
        raise ConfigError(
            f"{path.name!r} is neither .png nor .svg", field="--plot", hint="for example ledger.png"
        )
    figure = draw_ledgers(ledgers)
    content = as_png(figure) if kind == ".png" else as_svg(figure, salt="niss-ledger").encode()
    return write_atomically(path, content)


def _has_curve(rows: Sequence[ClientRow]) -> bool:
    return bool(rows) and rows[0].participations > 0 and rows[0].epsilon_spent is not None


def _panel(axes: Axes, label: str, ledger: LedgerFile, rows: Sequence[ClientRow]) -> None:
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
    axes.grid(axis="y", color=RULE, linewidth=0.7)
    axes.set_axisbelow(True)
    _curve(axes, ledger, worst, "worst-off", SERIES[1], "-")
    _curve(axes, ledger, median, "median", SERIES[0], (0, (1.4, 1.2)))
    if worst.epsilon_claim is not None:
        name = f"claim for client {short(worst.client, 12)}: ε {rounded_up(worst.epsilon_claim)}"
        axes.axhline(worst.epsilon_claim, color=INK, linestyle=(0, (4, 2)), linewidth=1.3, label=name)
    axes.set_ylim(0, 1.08 * max(worst.epsilon_spent or 0.0, worst.epsilon_claim or 0.0) or 1.0)
    # Above the axes the names cover no curve.
    legend = axes.legend(
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        title=title,
        alignment="left",
        fontsize=9.5,
        borderpad=0.0,
    )
    legend.get_title().set_parse_math(False)


def _curve(
    axes: Axes,
    ledger: LedgerFile,
    row: ClientRow,
    name: str,
    colour: str,
    style: str | tuple[int, tuple[float, float]],
) -> None:
    steps = spending(ledger, row.client)
    rounds = [0.0, *(step[0] for step in steps), axes.get_xlim()[1]]
    values = [0.0, *(step[3] or 0.0 for step in steps), row.epsilon_spent or 0.0]
    label = f"{name} (client {short(row.client, 12)}): ε {rounded_up(values[-1])} spent"
    axes.step(rounds, values, where="post", color=colour, linestyle=style, linewidth=2.0, label=label)
