"""What the terminal shows: quiet or not, live progress, result tables, and the last words of what was interrupted.

Results go to stdout, everything else to stderr. Colours follow NO_COLOR and FORCE_COLOR, in which NO_COLOR wins.
Whether anything moves on the screen is another question: only in a real terminal, whatever the colours.
"""

from __future__ import annotations

import json
import os
import signal
import textwrap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NoReturn, Self

import click
import typer
from rich.console import Console

from niss.claims import duration, percent
from niss.cli.errors import INTERRUPTED

if TYPE_CHECKING:
    from rich.progress import ProgressColumn, TaskID

    from niss.accounting import Outlook
    from niss.simulation.method_run import RoundEvent, TrainingEvent

_QUIET = "niss.cli.quiet"
# Rounds over which the time of one is averaged.
_LATEST_ROUNDS = 10
# Sentences in a narrower column would be read word by word.
_NARROWEST = 24


class ProcessState:
    """What is still needed when the command has ended and its context is gone.

    `debug` is whether a crash shows its traceback; `interruption_reported` whether a command that was interrupted has
    already said what it kept.
    """

    debug = False
    interruption_reported = False


STATE = ProcessState()


def be_quiet(context: typer.Context, value: bool) -> bool:
    """The callback of `--quiet`, which stands before the command, behind its name, or both."""
    context.meta[_QUIET] = value or context.meta.get(_QUIET, False)
    return bool(context.meta[_QUIET])


def is_quiet() -> bool:
    """Whether the running command was told to be quiet."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(_QUIET, False))


def messages() -> Console:
    """Where progress and remarks go, which `--quiet` silences; stdout is for results alone."""
    return Console(stderr=True, highlight=False, quiet=is_quiet())


def say(text: str) -> None:
    """Print a remark on stderr as it is: no markup, no line breaks added."""
    messages().print(text, soft_wrap=True, markup=False)


def warn(text: str) -> None:
    """Print something the user must know, quiet or not."""
    typer.echo(f"warning: {text}", err=True)


def results() -> Console:
    """Where tables go: as wide as the terminal or as COLUMNS says, and 140 columns where there is neither."""
    return Console(highlight=False, width=width_asked() or 140)


def width_asked() -> int | None:
    """The columns that results are printed in: what COLUMNS says, or those of the terminal; None in a pipe."""
    asked = os.environ.get("COLUMNS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    console = Console()
    return console.width if console.file.isatty() else None


def print_json(value: Any) -> None:
    """Print a result for programs."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[int] = (0,)) -> None:
    """Print a table of plain text on stdout, in which no cell is ever cut.

    `left` are the columns that hold words, all others hold numbers. Headings are broken between words, and so are
    cells of the last column where it holds words. Where the terminal is too narrow even so, every row becomes a block
    of lines.
    """
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    lines, console = [tuple(row) for row in rows], results()
    least = [
        max(map(cell_len, [*heading.split(), *(line[number] for line in lines)]), default=0)
        for number, heading in enumerate(header)
    ]
    room = console.width - sum(least) - 3 * (len(header) - 1)
    if room < 0 and len(header) - 1 in left:
        given = min(-room, max(0, least[-1] - _NARROWEST))
        least[-1] -= given
        room += given
    if room < 0:
        _print_blocks(console, header, lines)
        return
    table = Table(show_edge=False, pad_edge=False, header_style="bold")
    for number, heading in enumerate(header):
        more = min(max(cell_len(heading) - least[number], 0), room)
        room -= more
        table.add_column(heading, justify="left" if number in left else "right", width=least[number] + more)
    for line in lines:
        table.add_row(*map(Text, line))
    console.print(table)


def _print_blocks(console: Console, header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Each row as a heading with a line for each of its other cells."""
    from rich.cells import cell_len

    name_width = max(map(cell_len, header[1:]), default=0)
    for line in lines:
        console.print(f"{header[0]}: {line[0]}", style="bold", markup=False, soft_wrap=True)
        for heading, cell in zip(header[1:], line[1:], strict=True):
            padding = " " * (name_width - cell_len(heading))
            console.print(f"  {heading}{padding}  {cell}", markup=False, soft_wrap=True)


def print_sentence(text: str, *, indent: int = 0) -> None:
    """Print words about a result on stdout, without markup; lines are broken at the width that was asked for.

    indent  of all lines but the first
    """
    results().print(filled(text, indent=indent), soft_wrap=True, markup=False)


def filled(text: str, *, indent: int = 0) -> str:
    """The text with its lines broken between words at the width that was asked for."""
    width = width_asked()
    if width is None:
        return text
    whole: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(text, max(width, 20), subsequent_indent=" " * indent, **whole)


def print_aligned(lines: Iterable[tuple[str, str, str]]) -> None:
    """Print lines of a name, a value and a remark; a name that stands above already is not repeated.

    The values are aligned to the right; long remarks take several lines.
    """
    rows, above = list(lines), ""
    name_width, value_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    before = name_width + value_width + 4
    for name, value, remark in rows:
        shown, above = "" if name == above else name, name
        print_sentence(f"{shown:<{name_width}}  {value:>{value_width}}  {remark}".rstrip(), indent=before)


def free_folder(parent: Path, name: str) -> Path:
    """The first of NAME-1, NAME-2, ... that does not exist yet."""
    return next(path for path in (parent / f"{name}-{number}" for number in count(1)) if not path.exists())


@contextmanager
def kept_on_interrupt(describe: Callable[[], str]) -> Iterator[None]:
    """On Ctrl-C say what `describe` returns, what was kept and how to go on, and end with the code for it."""
    try:
        yield
    except KeyboardInterrupt:
        STATE.interruption_reported = True
        typer.echo(f"interrupted; {describe()}", err=True)
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM and SIGHUP end what this process has started as Ctrl-C does, instead of leaving it without an owner."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def animated(console: Console) -> bool:
    """Whether bars may move: FORCE_COLOR makes colours in a pipe, but no animation."""
    return console.file.isatty() and not console.is_dumb_terminal and not is_quiet()


@contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Show a line that moves while something is computed; yields a function that changes its text."""
    console = messages()
    if not animated(console):
        yield lambda _text: None
        return
    with console.status(text) as status:
        yield status.update


class LiveBars:
    """Bars in a terminal, each with its own name; without one, `_console` is for lines, and silent where quiet."""

    def __init__(self, column: ProgressColumn | None = None) -> None:
        """`column` is what stands behind a bar; None: the note of its last step."""
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = messages()
        self._live = animated(self._console)
        noted = column or TextColumn("{task.fields[note]}")
        columns = TextColumn("{task.description}"), BarColumn(), noted, TimeRemainingColumn()
        self._bar = Progress(*columns, console=self._console)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        if self._live:
            self._bar.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._live:
            self._bar.stop()

    def _move(self, name: str, done: float, total: float | None, **shown: Any) -> None:
        """Move the bar of that name, which is made where there is none."""
        if name not in self._tasks:
            self._tasks[name] = self._bar.add_task(name, total=total, completed=int(done), note="")
        self._bar.update(self._tasks[name], completed=done, total=total, **shown)


class RoundProgress(LiveBars):
    """Progress over rounds and methods: a bar a method in a terminal, a line every tenth of the rounds elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self._rounds_left: dict[str, int] = {}
        self._latest: dict[str, deque[float]] = {}
        self._begun = False

    def __call__(self, event: RoundEvent) -> None:
        """Show that a round of a method has ended."""
        title = f"{event.label} ({event.method_number}/{event.methods})" if event.methods > 1 else event.label
        note = f"round {event.round}/{event.rounds}, accuracy {percent(event.accuracy)}"
        self._rounds_left[event.label] = event.rounds - event.round
        self._latest.setdefault(event.label, deque(maxlen=_LATEST_ROUNDS)).append(event.seconds)
        if self._live:
            self._move(event.label, event.round, event.rounds, note=note, description=title)
        elif event.round == event.rounds or event.round % max(1, event.rounds // 10) == 0:
            self._console.print(f"{title}: {note}, {self._remaining(event.methods)}")

    def _remaining(self, methods: int) -> str:
        """How long the whole command takes from here, at the pace of the latest rounds.

        A method that has not ended a round yet is taken to be like the others.
        """
        known = [fmean(seconds) * self._rounds_left[label] for label, seconds in self._latest.items()]
        left = sum(known) * methods / len(known)
        return f"{duration(left)} left in all" if left else "done"

    def outlook(self, label: str, judged: Outlook) -> None:
        """Say before the first round of a method that its noise leaves little to learn."""
        if judged.verdict != "good":
            self._console.print(filled(f"{label}: {judged.words}"), soft_wrap=True, markup=False)

    def training(self, event: TrainingEvent) -> None:
        """Move the bars within a round, as clients are done; say that the first one has begun."""
        if self._live:
            for label in event.labels:
                note = {} if self._begun else {"note": f"training round {event.round}"}
                self._move(label, event.round - 1 + event.done / event.clients, event.rounds, **note)
        elif not self._begun:
            self._console.print(f"training round {event.round} of {event.rounds}")
        self._begun = True


class PartProgress(LiveBars):
    """Progress of an attack: a bar per part in a terminal; elsewhere a line at every quarter of a part."""

    def __call__(self, part: str, done: int, total: int, note: str) -> None:
        """Show that `done` of `total` steps of a part are over; `note` is a few words about it."""
        if self._live:
            self._move(part, done, total, note=f"{done}/{total} {note}")
        elif done == total or done % max(1, total // 4) == 0:
            self._console.print(f"{part}: {done}/{total} {note}", markup=False)


class DownloadProgress(LiveBars):
    """A bar for each file that is fetched, in a terminal; elsewhere a line when a file begins to arrive."""

    def __init__(self) -> None:
        from rich.progress import DownloadColumn

        super().__init__(DownloadColumn())

    def __call__(self, file: str, done: int, total: int | None) -> None:
        """Show that `done` of `total` bytes of a file have arrived."""
        if file not in self._tasks and not self._live:
            self._console.print(f"fetching {file}", soft_wrap=True, markup=False)
        self._move(file, done, total)
