"""What `niss up` does with its flags."""

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
from pathlib import Path
from typing import Any, NoReturn

import typer

from niss.cli.terminal import kept_on_interrupt, messages, print_json
from niss.errors import ConfigError, NissError
from niss.flower.deployment import Deployment, Settings

_DONE = "finished:completed"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def bring_up(
    *,
    nodes: int,
    tls: bool,
    tracker: bool,
    rounds: int,
    app: Path,
    settings: list[str],
    keep: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Up, run, down; an error if the run did not complete."""
    if not (app / "pyproject.toml").is_file():
        raise ConfigError(
            f"{app} is no Flower app: it has no pyproject.toml",
            field="--app",
            hint="run this from a checkout of niss, or name the folder of your app",
        )
    search = str(Path(sys.executable).parent)
    if shutil.which("flower-superlink", path=search) is None and shutil.which("flower-superlink") is None:
        raise ConfigError("Flower is not installed", hint="install it with: pip install 'niss[flower]'")
    more = {"rounds": rounds, **_parsed(settings)}

    def say(line: str) -> None:
        if not quiet:
            messages().print(_COLOUR.sub("", line), markup=False, soft_wrap=True)

    with kept_on_interrupt(lambda: _kept(keep)), _folder(keep) as folder, _terminated_like_interrupted():
        with Deployment(folder, Settings(nodes=nodes, tls=tls, tracker=tracker), say=say) as federation:
            run = federation.submit(app.resolve(), more)
            say(f"run {run} started")
            federation.stream(run, say)
            status = federation.status(run)
        if status != _DONE or not federation.report.exists():
            raise NissError(
                f"the run ended as {status!r}",
                hint="run it again with --keep FOLDER and read the logs there"
                if keep is None
                else f"read the logs in {folder / 'logs'}",
            )
        report = json.loads(federation.report.read_text())
    print_json(report) if as_json else _print(report)
    if not any(one["survivors"] for one in report["rounds"]):
        why = [one["skipped"] for one in report["rounds"] if one["skipped"]]
        raise NissError(
            "no round gave a result" + (f": {why[-1]}" if why else ""),
            hint="more nodes, or fewer colluders to be assumed: --set colluders=0",
        )


def _kept(keep: Path | None) -> str:
    down = "everything was taken down"
    return f"{down}, and nothing is kept" if keep is None else f"{down}; keys, logs and ledgers are in {keep}"


def _print(report: dict[str, Any]) -> None:
    for number, metrics in report["metrics"]["server"].items():
        shown = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        typer.echo(f"after round {number}: {shown}")
    for one in report["rounds"]:
        for node, why in one["lost"].items():
            typer.echo(f"round {one['round']}: node {node} was lost: {why}")
    typer.echo(f"\n{report['statement']['words']}\n")
    for caveat in report["statement"]["caveats"]:
        typer.echo(f"- {caveat}")


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """A new folder, kept if it is named and thrown away if it is not: it holds private keys."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="niss-up-") as made:
            yield Path(made)
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


def _parsed(settings: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for entry in settings:
        try:
            found |= tomllib.loads(entry)
        except tomllib.TOMLDecodeError:
            raise ConfigError(
                f"{entry!r} is no KEY=VALUE in TOML", field="--set", hint='for example mode="repair"'
            ) from None
    return found
