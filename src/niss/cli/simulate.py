"""`niss run` and `niss compare`: simulated training on this machine. They need torch."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import typer

from niss.cli.errors import MissingPackageError, optional_packages
from niss.cli.launch import on_all_gpus, rank
from niss.cli.options import argument, flag_of, from_options, option
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

if TYPE_CHECKING:
    from niss.simulation import Comparison, Config, RunResult

_WORDS_FOR_NUMBERS = {"tau2": "calibrated", "kappa": "planned"}
DEFAULT_METHODS = ("fedavg", "central-dp", "niss", "dp-fedavg")


@dataclass(frozen=True)
class Training:
    """What `run` and `compare` train. The metadata `key` is the setting of the configuration that a flag changes, and
    `usually` its default there, for the help.

    config         Settings; flags override them.
    preset         Start from settings shipped with niss: demo or paper.
    dataset        See `niss data list`.
    model          mlp, cnn, resnet or logistic; gru, lstm or transformer for text.
    split          iid, shards or dirichlet; natural, their default, for datasets that have clients.
    rounds         Number of rounds.
    seed           Seed of the simulation.
    clients        Number of clients; all of them for datasets that have clients.
    participants   Clients that take part in a round.
    epochs         Local epochs.
    batch_size     Local batch size.
    learning_rate  Local learning rate.
    epsilon        Privacy target of every client.
    delta          Privacy target of every client.
    clip           L2 bound on a client's update.
    device         Where clients train: auto, cpu, cuda, or cuda:all, a process for each GPU.
    settings       Any setting, e.g. privacy.scope=round.
    """

    config: Path | None = argument(None, metavar="[CONFIG.toml]")
    preset: str | None = None
    dataset: str | None = option(None, key="data.dataset", usually="mnist-mini")
    model: str | None = option(None, key="model.name", usually="mlp")
    split: str | None = option(None, key="data.split", usually="iid")
    rounds: int | None = option(None, key="rounds", usually="30")
    seed: int | None = option(None, key="seed", usually="1")
    clients: int | None = option(None, key="data.clients", usually="1000")
    participants: int | None = option(None, key="training.participants", usually="200")
    epochs: int | None = option(None, key="training.epochs", usually="5")
    batch_size: int | None = option(None, key="training.batch_size", usually="10")
    learning_rate: float | None = option(None, "--lr", key="training.learning_rate", usually="0.1")
    epsilon: float | None = option(None, key="privacy.epsilon", usually="3")
    delta: float | None = option(None, key="privacy.delta", usually="1e-05")
    clip: float | None = option(None, key="privacy.clip", usually="0.5")
    device: str | None = option(None, key="training.device", usually="auto")
    settings: list[str] | None = option(None, "--set", metavar="KEY=VALUE")


@dataclass(frozen=True)
class Output:
    """Where a run or comparison goes, and how its result is printed.

    out        Folder for everything this run leaves behind.
    resume     Go on with a run that was stopped.
    overwrite  Replace an earlier run in that folder.
    as_json    Print the result as JSON.
    """

    out: Path | None = None
    resume: Path | None = option(None, metavar="DIR")
    overwrite: bool = False
    as_json: bool = option(False, "--json")


@dataclass(frozen=True)
class Method:
    """The method of `niss run`; a field is the setting of the same name in `[[methods]]`.

    method      fedavg, dp-fedavg, central-dp, central-dp-sampled, central-mf, central-carried, secagg-ddg, niss or
                niss-carried.
    tau2        Distortion of received shares: a number, or 'calibrated'.
    kappa       Strength of the shares, in units of the noise a client would need alone: a number, or 'planned'.
    neighbours  Unit shares each client sends.
    graph       regular, complete or random.
    distortion  additive, scalar or coordinate.
    """

    method: str | None = option(None, usually="niss")
    tau2: str | None = option(None, usually="calibrated")
    kappa: str | None = option(None, usually="planned")
    neighbours: float | None = option(None, usually="10")
    graph: str | None = option(None, usually="regular")
    distortion: str | None = option(None, usually="additive")


@dataclass(frozen=True)
class Methods:
    """The methods of `niss compare`.

    methods  Comma-separated: fedavg, dp-fedavg, central-dp, central-dp-sampled, central-mf, central-carried,
             secagg-ddg, niss, niss-carried.
    """

    methods: tuple[str, ...] | None = None


@dataclass(frozen=True)
class FromPlan:
    """Where `niss run` may take its protection from.

    plan  What `niss plan --json` printed: rounds, participants, target and noise; flags override it.
    """

    plan: Path | None = option(None, metavar="PLAN.json")


@from_options(Training, FromPlan, Method, Output, quiet=True)
def run_command(training: Training, source: FromPlan, method: Method, output: Output) -> None:
    """Train with one method and say what it promised.

    Examples:
    niss run --dataset mnist-mini --model mlp --split iid --method niss --tau2 0.3 --rounds 20 --seed 1 --out runs/a
    niss run --dataset shakespeare --model gru --participants 20 --rounds 2 --epochs 1
    niss run CONFIG.toml --set privacy.epsilon=8 --json
    niss run --plan plan.json --out runs/planned      what `niss plan ... --json > plan.json` found
    niss run --resume runs/a
    """
    from niss.simulation import make_config

    if output.resume is not None:
        _resume(output, training, source, method)
        return
    planned, planned_method = _read_plan(source)
    config = _configure(training, planned)
    flags = {name: value for name, value in dataclasses.asdict(method).items() if value is not None}
    if len(config.methods) > 1 and "method" not in flags and not planned_method:
        raise ConfigError(
            f"{len(config.methods)} methods in these settings",
            field="methods",
            hint="choose one with --method, or use `niss compare`",
        )
    for name, word in _WORDS_FOR_NUMBERS.items():
        if flags.get(name, word) != word:
            flags[name] = _number(flags[name], name, word)
    values = config.model_dump(mode="json", exclude_none=True)
    # --method starts from the defaults of that method, the other flags from the settings.
    chosen = {"name": flags.pop("method")} if "method" in flags else planned_method or values["methods"][0]
    config = make_config({**values, "methods": [{**chosen, **flags}]})
    if planned:
        _check_kept(config)
    _execute("run", config, output)


@from_options(Methods, Training, Output, quiet=True)
def compare_command(methods: Methods, training: Training, output: Output) -> None:
    """Train with several methods on the same clients, batches and initial weights.

    Examples:
    niss compare --preset demo --out runs/demo
    niss compare --methods fedavg,dp-fedavg,central-dp,niss --epsilon 8 --rounds 20
    niss compare --resume runs/demo
    """
    from niss.simulation import make_config

    if output.resume is not None:
        _resume(output, training, methods)
        return
    config = _configure(training)
    names = methods.methods
    if names is None and training.config is None and training.preset is None:
        names = DEFAULT_METHODS
    if names is not None:
        values = config.model_dump(mode="json", exclude_none=True)
        config = make_config({**values, "methods": [{"name": name} for name in names]})
    _execute("compare", config, output)


def _read_plan(source: FromPlan) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings and the method of a plan; nothing where none is given."""
    from niss.accounting.plan_settings import HINT, settings_of_plan

    if source.plan is None:
        return {}, {}
    try:
        return settings_of_plan(read_json(source.plan))
    except RunFolderError as error:
        raise ConfigError(error.message, field="--plan", hint=HINT) from None


def _check_kept(config: Config) -> None:
    """Refuse settings under which clients would take part more often than was planned for."""
    planned = config.privacy.participations
    if planned is None:
        return
    free = config.model_copy(update={"privacy": config.privacy.model_copy(update={"participations": None})})
    if free.participations > planned:
        raise ConfigError(
            f"clients would take part {free.participations} times, and the plan is for {planned}",
            field="rounds",
            hint="fewer rounds, more clients, or a plan for more participations",
        )


def _configure(training: Training, planned: Mapping[str, Any] = MappingProxyType({})) -> Config:
    """Defaults, or a preset, or a file; then what a plan says; then flags; then --set."""
    from niss.simulation import Config, load_config, preset, with_overrides

    if training.config is not None and training.preset is not None:
        raise ConfigError("give a file or a preset, not both", field="--preset")
    if training.config is not None:
        config = load_config(training.config)
    else:
        config = Config() if training.preset is None else preset(training.preset)
    overrides = {
        field.metadata["key"]: value
        for field in dataclasses.fields(training)
        if "key" in field.metadata and (value := getattr(training, field.name)) is not None
    }
    return with_overrides(config, {**planned, **overrides, **parse_settings(training.settings)})


def parse_settings(settings: list[str] | None) -> dict[str, Any]:
    """The KEY=VALUE pairs of `--set`; a value is written as in TOML, and a bare word is a string."""
    values: dict[str, Any] = {}
    for setting in settings or []:
        key, separator, text = (part.strip() for part in setting.partition("="))
        if not separator:
            raise ConfigError(
                f"expected KEY=VALUE, got {setting!r}",
                field="--set",
                hint="for example --set privacy.epsilon=8",
            )
        try:
            values[key] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            values[key] = text
    return values


def _number(text: str, name: str, word: str) -> float:
    """The value of a flag that takes a number or one word."""
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"expected a number or {word!r}, got {text!r}", field=f"--{name}") from None


def _execute(work: Literal["run", "compare"], config: Config, output: Output) -> None:
    """Run or compare into `--out`, or into the first free folder of `runs/`, and present the result.

    torch is loaded here, once the settings have been found to be good.
    """
    from niss import simulation

    _check_neighbours(config)
    on_all_gpus(config.training.device)
    folder = output.out if output.out is not None else free_folder(Path("runs"), config.name)
    with kept_on_interrupt(lambda: _kept(folder)), RoundProgress() as progress:
        result = getattr(simulation, work)(config, out=folder, overwrite=output.overwrite, progress=progress)
    _present(result, folder, as_json=output.as_json)


def _check_neighbours(config: Config) -> None:
    """Refuse more shares than there are others to send them to; the default of 10 gives way in smaller rounds."""
    most = config.training.participants - 1
    for method in config.methods:
        usual = type(method).model_fields["neighbours"].default
        if method.kind.uses("neighbours") and method.neighbours > max(most, usual):
            raise ConfigError(
                f"a round of {most + 1} has only {most} others to send shares to, not {method.neighbours:g}",
                field="--neighbours",
                hint=f"at most {most}, which is everyone",
            )


def _resume(output: Output, *others: Any) -> None:
    """Go on with the run in a folder, which has its own settings: no other flag may be given."""
    from niss.simulation import resume

    for options in (*others, output):
        for field in dataclasses.fields(options):
            if field.name not in ("resume", "as_json") and getattr(options, field.name):
                raise ConfigError(
                    "cannot be changed when a run is resumed",
                    field=flag_of(field),
                    hint="a resumed run goes on with the settings in its folder; start a new one with --out",
                )
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
    from niss.methods import METHODS
    from niss.report import read_report_input, summary_rows, write_report

    if as_json:
        print_json(result.summary)
    else:
        # Where the terminal is narrow, kappa, tau^2 and the predicted noise go first: they are in the report.
        print_table(*summary_rows(read_report_input(folder)), spare=(1, 2, 5))
        for line in result.summary.get("methods", [result.summary]):
            method = METHODS.get(line["method"])
            if method is not None and method.trusts_server:
                secret = ", and that nobody learns who took part" if method.secret_draw else ""
                print_sentence(
                    f"{method.name}: its epsilon assumes a trusted server, which sees every bare update{secret}."
                )
        if "methods" not in result.summary:
            _print_promise(folder)
    try:
        with optional_packages():
            say(f"report: {write_report(folder)}")
    except MissingPackageError as error:
        say(f"no report: {error.message}; `niss report {folder}` writes it once that is installed")


def _print_promise(folder: Path) -> None:
    """What a run promised, in words: the guarantee, what it is worth to an attacker, and how to check it."""
    from niss.report.promise import read_promise

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
