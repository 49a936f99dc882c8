"""`niss run` and `niss compare`: simulated training on this machine. They need torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typing_extensions import Doc

from niss.cli.errors import MissingPackageError, optional_packages
from niss.cli.launch import on_all_gpus, rank
from niss.cli.options import Flags, argument, flag_of, from_options, option, parse_settings
from niss.cli.terminal import (
    RoundProgress,
    free_folder,
    kept_on_interrupt,
    print_json,
    print_sentence,
    print_table,
    say,
)
from niss.errors import ConfigError, RunFolderError
from niss.files import MANIFEST, read_json
from niss.simulation import Config
from niss.simulation.sections import MethodConfig

if TYPE_CHECKING:
    from niss.simulation.results import Comparison, RunResult

DEFAULT_METHODS = ("fedavg", "central-dp", "niss", "dp-fedavg")


# The settings that have a flag of their own, by flag; any other is changed with --set.
TRAINING = Flags(
    Config,
    {
        "--dataset": "data.dataset",
        "--model": "model.name",
        "--split": "data.split",
        "--rounds": "rounds",
        "--seed": "seed",
        "--clients": "data.clients",
        "--silos": "data.silos",
        "--participants": "training.participants",
        "--epochs": "training.epochs",
        "--batch-size": "training.batch_size",
        "--lr": "training.learning_rate",
        "--epsilon": "privacy.epsilon",
        "--delta": "privacy.delta",
        "--clip": "privacy.clip",
        "--device": "training.device",
    },
)
METHOD = Flags(
    MethodConfig,
    {
        "--method": "name",
        "--tau2": "tau2",
        "--kappa": "kappa",
        "--neighbours": "neighbours",
        "--graph": "graph",
        "--distortion": "distortion",
    },
)


@dataclass(frozen=True)
class Source:
    """What `run` and `compare` start from; flags override it."""

    config: Annotated[Path | None, Doc("Settings.")] = argument(None, metavar="[CONFIG.toml]")
    preset: Annotated[str | None, Doc("Start from settings shipped with niss: demo, silos or paper.")] = None
    settings: Annotated[list[str] | None, Doc("Any setting, e.g. privacy.scope=round.")] = option(
        None, "--set", metavar="KEY=VALUE"
    )


@dataclass(frozen=True)
class RunOutput:
    """Where a run or comparison goes, and how its result is printed."""

    out: Annotated[Path | None, Doc("Folder for everything this run leaves behind.")] = None
    resume: Annotated[Path | None, Doc("Go on with a run that was stopped.")] = option(None, metavar="DIR")
    overwrite: Annotated[bool, Doc("Replace an earlier run in that folder.")] = False
    as_json: Annotated[bool, Doc("Print the result as JSON.")] = option(False, "--json")


@dataclass(frozen=True)
class Methods:
    """The methods of `niss compare`."""

    methods: Annotated[tuple[str, ...] | None, Doc("Comma-separated names, as of `niss run --method`.")] = (
        None
    )


@dataclass(frozen=True)
class FromPlan:
    """Where `niss run` may take its protection from."""

    plan: Annotated[
        Path | None,
        Doc("What `niss plan --json` printed: rounds, participants, target and noise; flags override it."),
    ] = option(None, metavar="PLAN.json")


@from_options(Source, TRAINING, FromPlan, METHOD, RunOutput, quiet=True)
def run_command(
    source: Source, given: dict[str, Any], planned: FromPlan, method: dict[str, Any], output: RunOutput
) -> None:
    """Train with one method and say what it promised.

    Examples:
    niss run --dataset mnist-mini --model mlp --split iid --method niss --tau2 0.3 --rounds 20 --seed 1 --out runs/a
    niss run --clients 100 --participants 50 --rounds 3 --epsilon 8 --out runs/small      seconds, and it learns
    niss run CONFIG.toml --set privacy.epsilon=8 --json
    niss run --plan plan.json --out runs/planned      what `niss plan ... --json > plan.json` found
    niss run --resume runs/a
    """
    from niss.simulation import make_config

    if output.resume is not None:
        _resume(output, source, planned, flags=TRAINING.typed(given) + METHOD.typed(method))
        return
    settings, planned_method = _read_plan(planned)
    values = _configure(source, {**settings, **given})
    methods = values.get("methods", [{}])
    if len(methods) > 1 and "name" not in method and not planned_method:
        hint = "choose one with --method, or use `niss compare`"
        raise ConfigError(f"{len(methods)} methods in these settings", field="methods", hint=hint)
    # --method starts from the defaults of that method, the other flags from the settings.
    chosen = {} if "name" in method else planned_method or methods[0]
    config = make_config({**values, "methods": [{**chosen, **method}]})
    if settings:
        _check_kept(config)
    _execute("run", config, output)


@from_options(Methods, Source, TRAINING, RunOutput, quiet=True)
def compare_command(methods: Methods, source: Source, given: dict[str, Any], output: RunOutput) -> None:
    """Train with several methods on the same clients, batches and initial weights.

    Examples:
    niss compare --preset demo --out runs/demo
    niss compare --methods fedavg,dp-fedavg,central-dp,niss --epsilon 8 --rounds 20
    niss compare --resume runs/demo
    """
    from niss.simulation import make_config

    if output.resume is not None:
        _resume(output, source, methods, flags=TRAINING.typed(given))
        return
    values = _configure(source, given)
    names = methods.methods
    if names is None and source.config is None and source.preset is None:
        names = DEFAULT_METHODS
    if names is not None:
        values["methods"] = [{"name": name} for name in names]
    _execute("compare", make_config(values), output)


def _read_plan(source: FromPlan) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings and the method of a plan; nothing where none is given."""
    from niss.simulation import PLAN_HINT, settings_of_plan

    if source.plan is None:
        return {}, {}
    try:
        return settings_of_plan(read_json(source.plan))
    except RunFolderError as error:
        raise ConfigError(error.message, field="--plan", hint=PLAN_HINT) from None


def _check_kept(config: Config) -> None:
    """Refuse settings under which clients would take part more often than was planned for."""
    planned = config.privacy.participations
    free = dataclasses.replace(config, privacy=dataclasses.replace(config.privacy, participations="planned"))
    if planned != "planned" and free.participations > planned:
        words = f"clients would take part {free.participations} times, and the plan is for {planned}"
        hint = "fewer rounds, more clients, or a plan for more participations"
        raise ConfigError(words, field="rounds", hint=hint)


def _configure(source: Source, given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as in TOML: a file, or a preset, or none; then what a plan and flags say; then --set."""
    from niss.simulation import override, read_preset, read_toml

    if source.config is not None and source.preset is not None:
        raise ConfigError("give a file or a preset, not both", field="--preset")
    values: dict[str, Any] = {}
    if source.config is not None:
        values = read_toml(source.config)
    elif source.preset is not None:
        values = read_preset(source.preset)
    return override(values, {**given, **parse_settings(source.settings)})


def _execute(work: Literal["run", "compare"], config: Config, output: RunOutput) -> None:
    """Run or compare into `--out`, or into the first free folder of `runs/`, and present the result.

    torch is loaded here, once the settings have been found to be good.
    """
    from niss.data.catalog import spec_named

    spec_named(config.data.dataset)
    from niss.simulation import runner

    on_all_gpus(config.training.device)
    folder = output.out if output.out is not None else free_folder(Path("runs"), config.name)
    with kept_on_interrupt(lambda: _kept(folder)), RoundProgress() as progress:
        try:
            result = getattr(runner, work)(config, out=folder, overwrite=output.overwrite, progress=progress)
        except RunFolderError as error:
            if error.hint is not None and "overwrite=True" in error.hint:
                error.hint = f"continue it with --resume {folder}, or replace it with --overwrite"
            raise
    _present(result, folder, as_json=output.as_json)


def _resume(output: RunOutput, *others: Any, flags: list[str]) -> None:
    """Go on with the run in a folder, which has its own settings: no other flag may be given."""
    from niss.simulation.runner import resume

    typed = [
        flag_of(field)
        for options in (*others, output)
        for field in dataclasses.fields(options)
        if field.name not in ("resume", "as_json") and getattr(options, field.name)
    ]
    for flag in (*flags, *typed):
        hint = "a resumed run goes on with the settings in its folder; start a new one with --out"
        raise ConfigError("cannot be changed when a run is resumed", field=flag, hint=hint)
    folder = output.resume or Path()
    if not rank():
        on_all_gpus(str(read_json(folder / MANIFEST).get("config", {}).get("training", {}).get("device")))
    with kept_on_interrupt(lambda: _kept(folder)), RoundProgress() as progress:
        result = resume(folder, progress=progress)
    _present(result, folder, as_json=output.as_json)


def _kept(folder: Path) -> str:
    """What an interrupted run or comparison leaves behind, and how to go on."""
    if not (folder / MANIFEST).exists():
        return "nothing was started yet, and nothing is kept"
    return f"every whole round is kept. Go on with: niss run --resume {folder}"


def _present(result: RunResult | Comparison, folder: Path, *, as_json: bool) -> None:
    """Print the summary as JSON or as a table, write the report and say where it is; rank 0 does it for all."""
    if rank():
        return
    from niss.report import read_report_input, remarks, summary_rows, write_report

    if as_json:
        print_json(result.summary)
    else:
        report = read_report_input(folder)
        print_table(*summary_rows(report), left=(0, 4))
        for remark in remarks(report):
            print_sentence(f"note: {remark}", indent=6)
        if "methods" not in result.summary:
            _print_promise(folder)
    try:
        with optional_packages():
            say(f"report: {write_report(folder)}")
    except MissingPackageError as error:
        say(f"no report: {error.message}; `niss report {folder}` writes it once that is installed")


def _print_promise(folder: Path) -> None:
    """What a run promised, in words: the guarantee, what it is worth to an attacker, and how to check it."""
    from niss.runs.privacy import read_promise

    promise = read_promise(folder)
    if promise is None:
        return
    typer.echo("")
    print_sentence(f"promise: {promise.words}", indent=9)
    check = f"niss account {folder}" if promise.verified else None
    for name, text in (("odds", promise.odds), ("budget", promise.budget), ("check", check)):
        if text:
            print_sentence(f"{name + ':':<8} {text}", indent=9)
    for line in promise.caveats:
        print_sentence(f"note:    {line}", indent=9)
