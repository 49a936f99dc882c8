"""What the terminal shows: errors with hints, live progress, result tables."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from niss.errors import NissError

if TYPE_CHECKING:
    from niss.simulation import RoundEvent, TrainingEvent


def messages() -> Console:
    """Where progress and messages go; stdout is for results alone."""
    return Console(stderr=True, highlight=False)


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
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=140)
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
        self._live = self._console.is_terminal and not quiet
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
