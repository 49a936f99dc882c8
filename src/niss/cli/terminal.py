"""What the terminal shows: errors with hints, live progress, result tables.

Colours follow NO_COLOR and FORCE_COLOR, in which NO_COLOR wins. Whether anything moves on the screen is another
question: only in a real terminal, whatever the colours.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from niss.cli.exit_codes import INTERRUPTED
from niss.cli.switches import SWITCHES, is_quiet
from niss.errors import NissError

if TYPE_CHECKING:
    from niss.simulation import RoundEvent, TrainingEvent


def messages() -> Console:
    """Where progress and remarks go, which `--quiet` silences; stdout is for results alone."""
    return Console(stderr=True, highlight=False, quiet=is_quiet())


def results() -> Console:
    """Where tables go: as wide as the terminal, and 140 columns where there is none."""
    console = Console(highlight=False)
    return console if console.file.isatty() else Console(highlight=False, width=140)


def warn(text: str) -> None:
    """Something the user must know, quiet or not."""
    typer.echo(f"warning: {text}", err=True)


def animated(console: Console) -> bool:
    """Whether bars may move: FORCE_COLOR makes colours in a pipe, but no animation."""
    return console.file.isatty() and not console.is_dumb_terminal and not is_quiet()


@contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """A line that moves while something is computed; gives a function that changes its text."""
    console = messages()
    if not animated(console):
        yield lambda _text: None
        return
    with console.status(text) as status:
        yield status.update


@contextmanager
def kept_on_interrupt(kept: Callable[[], str]) -> Iterator[None]:
    """On Ctrl-C say what was kept and how to go on, and end with the code for it."""
    try:
        yield
    except KeyboardInterrupt:
        SWITCHES.interruption_told = True
        typer.echo(f"interrupted; {kept()}", err=True)
        raise typer.Exit(INTERRUPTED) from None


def print_error(error: NissError) -> None:
    """An intended error, as a person should read it."""
    typer.echo(f"error: {error.message}", err=True)
    if error.hint is not None:
        typer.echo(f"hint: {error.hint}", err=True)


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_summary(folder: Path) -> None:
    """The table of a finished run or comparison, on stdout."""
    from niss.report import read_report_input, summary_rows

    header, rows = summary_rows(read_report_input(folder))
    table = Table(show_edge=False, pad_edge=False, header_style="bold")
    for number, column in enumerate(header):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=number == 0)
    for row in rows:
        table.add_row(*row)
    console = results()
    console.print(table)
    if any(row[0].startswith("central-dp") for row in rows):
        console.print("central-dp: its epsilon assumes a trusted server, which sees every bare update.")


def free_folder(parent: Path, name: str) -> Path:
    """The first of NAME-1, NAME-2, ... that does not exist yet."""
    return next(path for path in (parent / f"{name}-{number}" for number in count(1)) if not path.exists())


class LiveBars:
    """Bars while a terminal shows them, each with its own name; without one, `_console` is for lines."""

    def __init__(self, *columns: ProgressColumn, quiet: bool) -> None:
        self._console = messages()
        self._quiet = quiet
        self._live = animated(self._console) and not quiet
        self._bar = Progress(TextColumn("{task.description}"), BarColumn(), *columns, console=self._console)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        if self._live:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._bar.stop()


class RoundProgress(LiveBars):
    """Live progress over rounds and methods: a bar in a terminal, a line now and then elsewhere."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__(
            TextColumn("round {task.fields[round]}/{task.total:.0f}"),
            TextColumn("accuracy {task.fields[accuracy]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            quiet=quiet,
        )

    def __call__(self, event: RoundEvent) -> None:
        if self._quiet:
            return
        accuracy = "-" if event.accuracy is None else f"{100 * event.accuracy:.1f} %"
        title = f"{event.label} ({event.method_number}/{event.methods})" if event.methods > 1 else event.label
        if self._live:
            task = self._task(event.label, event.round, event.rounds)
            self._bar.update(
                task, completed=event.round, round=event.round, accuracy=accuracy, description=title
            )
        elif event.round == event.rounds or event.round % max(1, event.rounds // 10) == 0:
            left = event.seconds * (event.rounds - event.round)
            self._console.print(
                f"{title}: round {event.round}/{event.rounds}, accuracy {accuracy}, {left:.0f} s left"
            )

    def training(self, event: TrainingEvent) -> None:
        """Move the bars within a round, as clients are done."""
        if self._live:
            for label in event.labels:
                task = self._task(label, event.round, event.rounds)
                self._bar.update(task, completed=event.round - 1 + event.done / event.clients)

    def _task(self, label: str, number: int, rounds: int) -> TaskID:
        if label not in self._tasks:
            self._tasks[label] = self._bar.add_task(
                label, total=rounds, completed=number - 1, round=number - 1, accuracy="-"
            )
        return self._tasks[label]


class DownloadProgress(LiveBars):
    """A bar for each file that is fetched, in a terminal; elsewhere a line when a file begins to arrive."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__(DownloadColumn(), TimeRemainingColumn(), quiet=quiet)

    def __call__(self, file: str, done: int, total: int | None) -> None:
        if file not in self._tasks:
            self._tasks[file] = self._bar.add_task(file, total=total)
            if not self._live and not self._quiet:
                self._console.print(f"fetching {file}", soft_wrap=True, markup=False)
        self._bar.update(self._tasks[file], completed=done, total=total)
