"""What `niss reproduce` does with its flags."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import typer

from niss.cli.terminal import RoundProgress, kept_on_interrupt, messages
from niss.errors import ConfigError
from niss.report.files import write_atomically
from experiments.reproduce.beyond import run_scale, run_setting
from experiments.reproduce.figure3 import FIGURE_3, run_panel, run_sweep
from experiments.reproduce.panels import PANELS, Panel, base_config, find_panel, panel_cells
from experiments.reproduce.results import read_result, result_path
from experiments.reproduce.runner import Watch
from experiments.reproduce.sensitivity import find_reading
from experiments.reproduce.settings import METHODS, SETTINGS, find_setting
from experiments.reproduce.text import TABLES
from experiments.reproduce.tuning import tune

Flags = Mapping[str, Any]
Piece = Callable[..., object]
"""A part of the work, called with `progress`."""
TABLES_FILE = "tables.md"


def figure_3(given: Flags) -> None:
    """The panels one after the other; all X and seeds of a panel at once."""
    chosen: dict[str, Any] = {
        "xs": _numbers(given["x"], "--x"),
        "reading": find_reading(given["reading"]),
    }
    pieces: dict[str, Piece] = {}
    for panel in _panels(given["panel"]):
        pieces[panel.name] = partial(run_panel, panel, **_training(given), **chosen)
        if given["dry_run"]:
            _announce(panel, given, chosen)
    if not given["dry_run"]:
        _work_through(pieces, given)


def _announce(panel: Panel, given: Flags, chosen: Mapping[str, Any]) -> None:
    overrides = _overrides(given["settings"])
    base = base_config(panel, rounds=given["rounds"], device=given["device"], overrides=overrides)
    known = read_result(result_path(given["out"], FIGURE_3, panel.name))
    done = {cell.id for cell in known.cells} if known else set()
    left = [cell for cell in panel_cells(base, seeds=seeds_of(given), **chosen) if cell not in done]
    seconds = panel.expected_seconds(given["rounds"], len(left))
    typer.echo(f"{panel.name}: {len(left)} cells left, about {seconds:.0f} s on an H200")


def sweep(given: Flags) -> None:
    """X = 1 over sigma_k, for each panel."""
    sigmas = None if given["sigmas"] is None else _numbers(given["sigmas"], "--sigmas")
    pieces: dict[str, Piece] = {}
    for panel in _panels(given["panel"]):
        pieces[panel.name] = partial(run_sweep, panel, **_training(given), sigmas=sigmas)
    _work_through(pieces, given)


def beyond(given: Flags) -> None:
    """For each setting: tune every method, then run it."""
    epsilons = _numbers(given["epsilons"], "--epsilons")
    tuned_at = _numbers(given["tune_epsilons"], "--tune-epsilons")
    methods = tuple(METHODS) if given["methods"] is None else names_in(given["methods"])
    where = {name: given[name] for name in ("out", "work", "device", "at_once")}
    pieces: dict[str, Piece] = {}
    for name in SETTINGS if given["setting"] == "all" else names_in(given["setting"]):
        setting = find_setting(name, rounds=given["rounds"], participants=given["participants"])
        if given["tune"] or given["tune_only"]:
            pieces[f"{name}, tuning"] = partial(tune, setting, tuned_at, **where)
        if not given["tune_only"]:
            pieces[name] = partial(
                run_setting,
                setting,
                **where,
                epsilons=epsilons,
                methods=methods,
                variants=_variants(given["variant"], setting.unit),
                seeds=seeds_of(given),
            )
    _work_through(pieces, given)


def scale(given: Flags) -> None:
    """The same comparison for each size of a round."""
    sizes = [int(size) for size in _numbers(given["sizes"], "--sizes")]
    pieces: dict[str, Piece] = {}
    for size in sizes:
        pieces[f"{size} participants"] = partial(
            run_scale,
            out=given["out"],
            work=given["work"],
            dataset=given["dataset"],
            sizes=(size,),
            epsilon=given["epsilon"],
            seeds=seeds_of(given),
            rounds=given["rounds"],
            device=given["device"],
            at_once=given["at_once"],
        )
    _work_through(pieces, given)


def present(out: Path, work: Path | None = None) -> None:
    """Write the tables, draw the figures, and say where; Figure 4 needs the pictures that are in `work`."""
    parts = [f"## {name}\n\n{table(out)}" for name, table in TABLES.items()]
    write_atomically(out / TABLES_FILE, "\n".join(parts).encode())
    typer.echo(str(out / TABLES_FILE))
    try:
        # Experiments run where nothing can be drawn, and what they found is kept all the same.
        from experiments.reproduce.chart import write_figures
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] != "matplotlib":
            raise
        messages().print("no figures: matplotlib is missing here; `niss reproduce figures` draws them")
        return
    for path in write_figures(out, work):
        typer.echo(str(path))


def _work_through(pieces: Mapping[str, Piece], given: Flags) -> None:
    """One piece after the other, with progress; whatever ends it, what is whole is presented."""
    began = time.monotonic()
    with presented(given):
        for number, (name, piece) in enumerate(pieces.items(), start=1):
            messages().print(f"{name} ({number} of {len(pieces)})", soft_wrap=True)
            with RoundProgress(quiet=given["quiet"]) as progress:
                piece(progress=Watch(progress, seconds=seconds_left(given, began)))


@contextmanager
def presented(given: Flags) -> Iterator[None]:
    """Present the results once the work ends, whatever ends it; a cell that is not whole goes on next time."""
    with kept_on_interrupt(lambda: "the same command goes on where this one stopped"):
        try:
            yield
        finally:
            if given["out"].is_dir():
                present(given["out"], given["work"])


def seconds_left(given: Flags, began: float) -> float | None:
    """Of those given with `--stop-after`, if any."""
    seconds = given["stop_after"]
    return None if seconds is None else float(began + seconds - time.monotonic())


def _training(given: Flags) -> dict[str, Any]:
    common = {name: given[name] for name in ("out", "work", "rounds", "device")}
    return {**common, "seeds": seeds_of(given), "overrides": _overrides(given["settings"])}


def seeds_of(given: Flags) -> list[int]:
    return list(range(given["first_seed"], given["first_seed"] + given["seeds"]))


def _panels(names: str) -> Sequence[Panel]:
    return PANELS if names == "all" else [find_panel(name) for name in names_in(names)]


def names_in(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _variants(text: str, unit: str) -> list[str]:
    """The variants asked for; the real protocol, which is what drops clients, hides whole clients only."""
    names = names_in(text)
    return names if unit == "client" else [name for name in names if name not in ("tolerate", "repair")]


def _numbers(text: str, flag: str) -> list[float]:
    try:
        return [float(part) for part in names_in(text)]
    except ValueError:
        raise ConfigError(f"{text!r} is no list of numbers", field=flag, hint="for example 0,0.3,1") from None


def _overrides(settings: Sequence[str] | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for setting in settings or ():
        key, separator, value = setting.partition("=")
        if not separator:
            raise ConfigError(f"{setting!r} is no KEY=VALUE", field="--set")
        try:
            found[key.strip()] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            found[key.strip()] = value.strip()
    return found
