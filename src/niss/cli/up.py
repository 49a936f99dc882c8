"""`niss new`, a Flower app to begin with, and `niss up`, a whole federation on this machine, first process to last."""

from __future__ import annotations

import json
import keyword
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typing_extensions import Doc

from niss.claims import digits
from niss.cli.options import argument, from_options, option, parse_settings
from niss.cli.terminal import kept_on_interrupt, print_json, say, terminated_like_interrupted
from niss.errors import ConfigError, NissError, PausedError
from niss.files import SHARED, read_json, write_atomically, write_json

if TYPE_CHECKING:
    from niss.local.deployment import Settings

_DONE = "finished:completed"
_RUN = "run.json"
_MORE_NODES = "use more nodes, or assume fewer colluders: --set collusion=0"
# So few clients that the noise is a match for the updates: with half of the app's clip they learn faster.
_FOR_FEW_NODES = {"clip": 1.0}
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
RESUME = "resume"
"""The setting that names the folder in which the ServerApp saves the run."""
# What every app must have among its settings; those of trackers where there is one.
_NEEDED = ("server-key", "coalition", "report", "min-nodes", "rounds")
_FOR_TRACKERS = ("tracker", "tracker-ca")
# By kind of app: its folder among the examples and where a wheel has it, its package and its project.
_BUILT_IN = {
    "clients": ("flower_app", "app", "flower_app", "niss-flower-app"),
    "silos": ("silos-images", "silos_app", "silos_images", "niss-silos-images"),
}
# What a project may be called, beginning with a letter, as its package has to.
_NAME = re.compile(r"[A-Za-z](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_INSTALL = "pip install '../..[flower]' 'flwr[simulation]'"


@dataclass(frozen=True)
class NewOptions:
    """Where the app goes."""

    folder: Annotated[Path, Doc("A new folder; its name becomes that of the app.")] = argument(metavar="NAME")
    silos: Annotated[
        bool, Doc("For a few organisations with many records each, of which every single one is hidden.")
    ] = False


@from_options(NewOptions)
def new_command(options: NewOptions) -> None:
    """Write a Flower app that learns under NISS, ready to run and to change: the model and data are in task.py.

    Examples:
    niss new my-app
    niss new apps/digits      then: niss up --app apps/digits
    niss new --silos my-silos
    """
    folder = new_app(options.folder, "silos" if options.silos else "clients")
    typer.echo(str(folder))
    say(f"try it: niss up --app {folder}, or: cd {folder} && flwr run . --stream")


@dataclass(frozen=True)
class UpOptions:
    """What to start, and the app that runs on it."""

    nodes: Annotated[int, Doc("How many SuperNodes to start.")] = option(12, min=2)
    tls: Annotated[bool, Doc("TLS everywhere, and SuperNodes that authenticate themselves.")] = True
    tracker: Annotated[bool, Doc("A tracker hands out keys and holds the beacon; else the server does.")] = (
        True
    )
    rounds: Annotated[int, Doc("Rounds of training.")] = option(3, min=1)
    app: Annotated[
        Path | None, Doc("The Flower app to run; without it one that is built in, which learns digits.")
    ] = option(None, metavar="FOLDER")
    settings: Annotated[list[str] | None, Doc("A setting of the app; may be repeated.")] = option(
        None, "--set", metavar="KEY=VALUE"
    )
    keep: Annotated[
        Path | None, Doc("Keep keys, logs, ledgers, the report and the saved run in this new folder.")
    ] = option(None, metavar="FOLDER")
    resume: Annotated[
        Path | None, Doc("Go on with the run in a folder that was kept; everything else is as it was.")
    ] = option(None, metavar="FOLDER")
    as_json: Annotated[bool, Doc("Print the report as JSON.")] = option(False, "--json")


@from_options(UpOptions, quiet=True)
def up_command(options: UpOptions) -> None:
    """Start tracker, SuperLink and SuperNodes on this machine, run an app, and take everything down again.

    Examples:
    niss up --tls
    niss up --nodes 3 --rounds 2 --no-tls --no-tracker --keep runs/up
    niss up --resume runs/up
    niss up --app my_app --set epsilon=3.0 --set clip=1.0
    """
    search = str(Path(sys.executable).parent)
    if shutil.which("flower-superlink", path=search) is None and shutil.which("flower-superlink") is None:
        raise ConfigError("Flower is not installed", hint="install it with: pip install 'niss[flower]'")
    kept = options.keep or options.resume
    with kept_on_interrupt(lambda: _kept(kept)), _folder(options) as folder, terminated_like_interrupted():
        report = _run(folder, kept, *_prepared(folder, options))
    print_json(report) if options.as_json else _print(report)
    if nothing := _without_a_result(report):
        raise NissError(nothing, hint=_MORE_NODES)


def _prepared(folder: Path, options: UpOptions) -> tuple[Settings, Path, dict[str, Any]]:
    """What to start, the app to run, and its settings: as the options say, or as the folder that was kept says.

    What cannot work is refused before anything is started.
    """
    from niss.local.deployment import Settings

    if options.resume is not None:
        before = read_json(folder / _RUN)
        return Settings.of_folder(folder), Path(before["app"]), before["settings"]
    parts = Settings(nodes=options.nodes, tls=options.tls, tracker=options.tracker)
    settings = {"rounds": options.rounds, **parse_settings(options.settings)}
    app = options.app
    if app is None:
        settings = {**_FOR_FEW_NODES, **settings}
        app = folder / "app"
        shutil.copytree(built_in_app(), app, ignore=shutil.ignore_patterns("__pycache__"))
    if not (app / "pyproject.toml").is_file():
        hint = "name the folder of your app, or leave --app out for the one that is built in"
        raise ConfigError(f"{app} has no pyproject.toml: it is no Flower app", field="--app", hint=hint)
    check_app(app, settings, tracker=parts.tracker)
    if RESUME in app_settings(app):
        settings[RESUME] = str(folder / "server")
    write_json(folder / _RUN, {"app": str(app.resolve()), "settings": settings}, mode=SHARED)
    return parts, app.resolve(), settings


def _run(
    folder: Path, kept: Path | None, parts: Settings, app: Path, settings: dict[str, Any]
) -> dict[str, Any]:
    """Up, run, down; returns the report. An error if the run did not complete."""
    from niss.local.deployment import Deployment

    def show(line: str) -> None:
        say(_COLOUR.sub("", line))

    with Deployment(folder, parts, say=show, passing=kept is None) as federation:
        run = federation.submit(app, settings)
        show(f"run {run} started")
        federation.stream(run, show)
        status = federation.status(run)
    report = json.loads(federation.report.read_text()) if federation.report.exists() else None
    logs = f"read the logs in {folder / 'logs'}, then go on with: niss up --resume {folder}"
    if report is not None and report["paused"]:
        raise PausedError(report["paused"], hint=logs if kept else "with --keep FOLDER it could have gone on")
    if status != _DONE or report is None:
        # A ServerApp whose strategy was given no update ends with an error, and the report knows why.
        nothing = _without_a_result(report) if report is not None and report["rounds"] else ""
        again = "run it again with --keep FOLDER and read the logs there"
        raise NissError(
            f"the run ended as {status!r}" + (f": {nothing}" if nothing else ""),
            hint=_MORE_NODES if nothing else again if kept is None else logs,
        )
    return report  # type: ignore[no-any-return]


def _without_a_result(report: dict[str, Any]) -> str:
    """That no round gave a result, and why the last one that was skipped did not; empty where one did."""
    if any(one["survivors"] for one in report["rounds"]):
        return ""
    reasons = [one["skipped"] for one in report["rounds"] if one["skipped"]]
    return "no round gave a result" + (f": {reasons[-1]}" if reasons else "")


def _kept(keep: Path | None) -> str:
    """What is left after Ctrl-C, once everything was taken down."""
    down = "everything was taken down"
    if keep is None:
        return f"{down}, and nothing is kept"
    return f"{down}; keys, logs and ledgers are in {keep}. Go on with: niss up --resume {keep}"


def _print(report: dict[str, Any]) -> None:
    """Print the accuracy after each round, the nodes that were lost, and the privacy statement with its caveats."""
    for number, metrics in report["metrics"]["server"].items():
        values = ", ".join(f"{name} {_in_digits(value)}" for name, value in metrics.items())
        typer.echo(f"after round {number}: {values}")
    for one in report["rounds"]:
        for node, reason in one["lost"].items():
            typer.echo(f"round {one['round']}: node {node} was lost: {reason}")
    typer.echo(f"\n{report['statement']['words']}\n")
    for caveat in report["statement"]["caveats"]:
        typer.echo(f"- {caveat}")


def _in_digits(value: float | list[float]) -> str:
    """A metric of Flower's, a number or a list of them, in four digits; null stays null."""
    if isinstance(value, list):
        return "[" + ", ".join(map(_in_digits, value)) + "]"
    return digits(value, 4) if isinstance(value, float) else str(value)


@contextmanager
def _folder(options: UpOptions) -> Iterator[Path]:
    """A new folder, kept if it is named and deleted if it is not, as it holds private keys; or one that was kept."""
    keep = options.keep
    if options.resume is not None:
        if keep is not None:
            raise ConfigError("a resumed run is kept where it is", field="--keep", hint="leave it out")
        if not (options.resume / _RUN).is_file():
            words, hint = f"{options.resume} was not kept by niss up", "name a folder of `niss up --keep`"
            raise ConfigError(words, field="--resume", hint=hint)
        yield options.resume.resolve()
        return
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="niss-up-") as temporary:
            yield Path(temporary)
        return
    if keep.exists() and any(keep.iterdir()):
        raise ConfigError(f"{keep} is not empty", field="--keep", hint="name a new folder")
    keep.mkdir(mode=0o700, parents=True, exist_ok=True)
    yield keep.resolve()


def built_in_app(kind: str = "clients") -> Path:
    """The app that learns digits and hides `clients` or the records of `silos`; a wheel has both beside this file."""
    example, inside, *_ = _BUILT_IN[kind]
    packaged = Path(__file__).parents[1] / "local" / inside
    return packaged if packaged.is_dir() else Path(__file__).parents[3] / "examples" / example


def app_settings(app: Path) -> dict[str, Any]:
    """The settings of a Flower app, `[tool.flwr.app.config]`, with names as `--run-config` has them."""
    try:
        project = tomllib.loads((app / "pyproject.toml").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{app} is not a Flower app: {error}", field="--app") from None
    return _flat(project.get("tool", {}).get("flwr", {}).get("app", {}).get("config", {}))


def check_app(app: Path, more: Iterable[str], *, tracker: bool) -> None:
    """Refuse an app that does not know the settings it would be given, those in `more` and those of the federation.

    Flower would call that an invalid configuration. `tracker` says whether there is one.
    """
    known = app_settings(app)
    wanted = [*_NEEDED, *(_FOR_TRACKERS if tracker else ()), *more]
    if missing := [name for name in dict.fromkeys(wanted) if name not in known]:
        raise ConfigError(
            f"{app} has no setting {', '.join(map(repr, missing))}",
            field="--app",
            hint="add what is missing to [tool.flwr.app.config] in its pyproject.toml, for example "
            f'{missing[0]} = "", and use it as the ServerApp of the built-in app does',
        )


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def new_app(folder: Path, kind: str = "clients") -> Path:
    """Write the built-in app of that kind into `folder`, which must not exist, named like it; returns the folder.

    Its package is the name as Python takes it, so `my-app` has the package `my_app`.
    """
    name = folder.name
    package = re.sub(r"[._-]+", "_", name.lower())
    if not _NAME.fullmatch(name) or keyword.iskeyword(package):
        raise ConfigError(
            f"{name!r} cannot be the name of an app",
            field="NAME",
            hint="take letters, digits and hyphens, such as my-app",
        )
    if folder.exists():
        raise ConfigError(f"{folder} already exists", field="NAME", hint="choose another name")
    template, (*_, old, project) = built_in_app(kind), _BUILT_IN[kind]
    for path in sorted(template.rglob("*")):
        if path.is_dir() or "__pycache__" in path.parts:
            continue
        target = folder / Path(
            *(package if part == old else part for part in path.relative_to(template).parts)
        )
        text = path.read_text(encoding="utf-8").replace(old, package).replace(project, name)
        text = text.replace(_INSTALL, "pip install 'niss[flower,train]' 'flwr[simulation]'")
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, text.encode("utf-8"), mode=SHARED)
    return folder
