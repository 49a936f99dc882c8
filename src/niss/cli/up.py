"""`niss up`: a whole federation on this machine, from the first process to the last."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import typer

from niss.cli.options import from_options, option
from niss.cli.terminal import kept_on_interrupt, print_json, say
from niss.errors import ConfigError, NissError

_DONE = "finished:completed"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class UpOptions:
    """What to start, and the app that runs on it.

    nodes     How many SuperNodes to start.
    tls       TLS everywhere, and SuperNodes that authenticate themselves.
    tracker   A tracker hands out keys and holds the beacon; else the server does.
    rounds    Rounds of training.
    app       The Flower app to run.
    settings  A setting of the app, in TOML; may be repeated.
    keep      Keep keys, logs, ledgers and the report in this new folder.
    as_json   Print the report as JSON.
    """

    nodes: int = option(5, min=2)
    tls: bool = True
    tracker: bool = True
    rounds: int = option(3, min=1)
    app: Path = option(Path("examples/flower_app"), metavar="FOLDER")
    settings: list[str] | None = option(None, "--set", metavar="KEY=VALUE")
    keep: Path | None = option(None, metavar="FOLDER")
    as_json: bool = option(False, "--json")


@from_options(UpOptions, quiet=True)
def up_command(options: UpOptions) -> None:
    """Start tracker, SuperLink and SuperNodes on this machine, run an app, and take everything down again.

    Examples:
    niss up --nodes 5 --tls
    niss up --nodes 3 --rounds 2 --no-tls --no-tracker --set colluders=0 --keep runs/up
    niss up --app my_app --set epsilon=3.0 --set clip=1.0
    """
    app, keep = options.app, options.keep
    if not (app / "pyproject.toml").is_file():
        raise ConfigError(
            f"{app} is not a Flower app: it has no pyproject.toml",
            field="--app",
            hint="run this from a checkout of niss, or name the folder of your app",
        )
    search = str(Path(sys.executable).parent)
    if shutil.which("flower-superlink", path=search) is None and shutil.which("flower-superlink") is None:
        raise ConfigError("Flower is not installed", hint="install it with: pip install 'niss[flower]'")
    settings = {"rounds": options.rounds, **_parse(options.settings or [])}
    with kept_on_interrupt(lambda: _kept(keep)), _folder(keep) as folder, _terminated_like_interrupted():
        report = _run(folder, options, settings)
    print_json(report) if options.as_json else _print(report)
    if not any(one["survivors"] for one in report["rounds"]):
        reasons = [one["skipped"] for one in report["rounds"] if one["skipped"]]
        raise NissError(
            "no round gave a result" + (f": {reasons[-1]}" if reasons else ""),
            hint="use more nodes, or assume fewer colluders: --set colluders=0",
        )


def _run(folder: Path, options: UpOptions, settings: dict[str, Any]) -> dict[str, Any]:
    """Up, run, down; returns the report. An error if the run did not complete."""
    from niss.local import Deployment, Settings

    def show(line: str) -> None:
        say(_COLOUR.sub("", line))

    parts = Settings(nodes=options.nodes, tls=options.tls, tracker=options.tracker)
    with Deployment(folder, parts, say=show) as federation:
        run = federation.submit(options.app.resolve(), settings)
        show(f"run {run} started")
        federation.stream(run, show)
        status = federation.status(run)
    if status != _DONE or not federation.report.exists():
        logs = f"read the logs in {folder / 'logs'}"
        again = "run it again with --keep FOLDER and read the logs there"
        raise NissError(f"the run ended as {status!r}", hint=again if options.keep is None else logs)
    return json.loads(federation.report.read_text())  # type: ignore[no-any-return]


def _kept(keep: Path | None) -> str:
    """What is left after Ctrl-C, once everything was taken down."""
    down = "everything was taken down"
    return f"{down}, and nothing is kept" if keep is None else f"{down}; keys, logs and ledgers are in {keep}"


def _print(report: dict[str, Any]) -> None:
    """Print the accuracy after each round, the nodes that were lost, and the privacy statement with its caveats."""
    for number, metrics in report["metrics"]["server"].items():
        values = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        typer.echo(f"after round {number}: {values}")
    for one in report["rounds"]:
        for node, reason in one["lost"].items():
            typer.echo(f"round {one['round']}: node {node} was lost: {reason}")
    typer.echo(f"\n{report['statement']['words']}\n")
    for caveat in report["statement"]["caveats"]:
        typer.echo(f"- {caveat}")


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """A new folder, kept if it is named and deleted if it is not: it holds private keys."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="niss-up-") as temporary:
            yield Path(temporary)
        return
    if keep.exists() and any(keep.iterdir()):
        raise ConfigError(f"{keep} is not empty", field="--keep", hint="name a new folder")
    keep.mkdir(mode=0o700, parents=True, exist_ok=True)
    yield keep.resolve()


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM and SIGHUP take everything down as Ctrl-C does, instead of leaving it up without an owner."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _parse(settings: list[str]) -> dict[str, Any]:
    """The settings of the app: unlike those of `niss run`, bare words are refused, as Flower does."""
    values: dict[str, Any] = {}
    for entry in settings:
        try:
            values |= tomllib.loads(entry)
        except tomllib.TOMLDecodeError:
            raise ConfigError(
                f"expected KEY=VALUE in TOML, got {entry!r}", field="--set", hint='for example mode="repair"'
            ) from None
    return values
