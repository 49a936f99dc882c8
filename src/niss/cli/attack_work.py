"""What every `niss attack` command does with its experiment: run it, show it, and keep what it has on Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import TextColumn, TimeRemainingColumn
from rich.table import Table

from niss.attacks.findings import Experiment, Findings, prepare_folder, write_findings
from niss.cli.terminal import LiveBars, free_folder, kept_on_interrupt, messages, print_json, results
from niss.report import write_report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw = Callable[[Findings], "Figure | None"]


def execute(
    experiment: Experiment, draw: Draw, *, out: Path | None, overwrite: bool, as_json: bool, quiet: bool
) -> None:
    """Check, run, write `attack.json`, `attack.png` and the report, print the table; interrupted, as far as it got."""
    findings = experiment.start()
    folder = out if out is not None else free_folder(Path("runs"), f"attack-{findings.attack}")
    prepare_folder(folder, overwrite=overwrite)

    def kept() -> str:
        page = _keep(findings, draw, folder)
        return f"what was found so far is in {page}. Start again with --overwrite"

    with kept_on_interrupt(kept), AttackProgress(quiet=quiet) as progress:
        experiment.run(findings, progress)
    page = _keep(findings, draw, folder)
    if as_json:
        print_json(findings.to_json())
    else:
        print_table(findings)
    messages().print(f"report: {page}", soft_wrap=True, markup=False)


def plain_device(name: str) -> None:
    """Check `--device` for an attack that is plain arithmetic and runs on the CPU whatever there is."""
    from niss.learning import choose_device

    choose_device(name, field="--device")


def _keep(findings: Findings, draw: Draw, folder: Path) -> Path:
    """Write everything down; returns the page that shows it."""
    write_findings(findings, folder)
    try:
        figure = draw(findings)
    except (KeyError, IndexError, ValueError):
        # An interrupted experiment may have too little for its figure.
        if findings.finished:
            raise
        figure = None
    if figure is not None:
        from niss.attacks.drawing import save

        save(figure, folder / "attack.png")
    return write_report(folder)


def print_table(findings: Findings) -> None:
    """The rows on stdout, and the result in words."""
    table = Table(show_edge=False, pad_edge=False, header_style="bold")
    for number, heading in enumerate(findings.columns.values()):
        table.add_column(heading, justify="left" if number == 0 else "right", no_wrap=number == 0)
    for row in findings.rows:
        table.add_row(*(_shown(row.get(key)) for key in findings.columns))
    console = results()
    console.print(table)
    if findings.headline:
        console.print(findings.headline, soft_wrap=True, markup=False)


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            return "∞" if value > 0 else "–"
        return f"{value:.3g}"
    return str(value)


class AttackProgress(LiveBars):
    """A bar per part in a terminal; elsewhere a line when a part begins and ends."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__(
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            quiet=quiet,
        )

    def __call__(self, part: str, done: int, total: int, note: str) -> None:
        if self._quiet:
            return
        if self._live:
            if part not in self._tasks:
                self._tasks[part] = self._bar.add_task(part, total=total, note="")
            self._bar.update(self._tasks[part], completed=done, total=total, note=note)
        elif done == total or done % max(1, total // 4) == 0:
            self._console.print(f"{part}: {done}/{total} {note}", markup=False)
