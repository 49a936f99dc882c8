"""What `niss run` and `niss compare` do with their flags."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from niss.cli.terminal import (
    RoundProgress,
    free_folder,
    kept_on_interrupt,
    messages,
    print_json,
    print_summary,
)
from niss.errors import ConfigError
from niss.report import write_report
from niss.simulation import (
    Comparison,
    Config,
    RunResult,
    compare,
    load_config,
    make_config,
    preset,
    resume,
    run,
    with_overrides,
)

SETTING_FLAGS = {
    "dataset": "data.dataset",
    "split": "data.split",
    "clients": "data.clients",
    "model": "model.name",
    "rounds": "rounds",
    "seed": "seed",
    "participants": "training.participants",
    "epochs": "training.epochs",
    "batch_size": "training.batch_size",
    "learning_rate": "training.learning_rate",
    "epsilon": "privacy.epsilon",
    "delta": "privacy.delta",
    "clip": "privacy.clip",
    "device": "training.device",
}
METHOD_FLAGS = ("method", "tau2", "kappa", "neighbours", "graph", "distortion")
DEFAULT_METHODS = "fedavg,central-dp,niss,dp-fedavg"

Flags = Mapping[str, Any]


def run_from_flags(given: Flags) -> None:
    """One method: that of the settings, changed by the flags; `--method` starts from its defaults."""
    if given["resume"] is not None:
        _resume(given)
        return
    config = _configure(given)
    flags = {flag: given[flag] for flag in METHOD_FLAGS if given[flag] is not None}
    if len(config.methods) > 1 and "method" not in flags:
        raise ConfigError(
            f"{len(config.methods)} methods in these settings",
            field="methods",
            hint="choose one with --method, or use `niss compare`",
        )
    if flags.get("tau2", "calibrated") != "calibrated":
        flags["tau2"] = _number(flags["tau2"])
    values = config.model_dump(mode="json", exclude_none=True)
    method = {} if "method" in flags else values["methods"][0]
    method |= {"name" if flag == "method" else flag: value for flag, value in flags.items()}
    _execute(run, make_config({**values, "methods": [method]}), given)


def compare_from_flags(given: Flags) -> None:
    """Several methods: those of the settings, or the ones named."""
    if given["resume"] is not None:
        _resume(given)
        return
    config = _configure(given)
    names = given["methods"]
    if names is None and given["config"] is None and given["preset"] is None:
        names = DEFAULT_METHODS
    if names is not None:
        wanted = [{"name": name.strip()} for name in names.split(",")]
        config = make_config({**config.model_dump(mode="json", exclude_none=True), "methods": wanted})
    _execute(compare, config, given)


def _configure(given: Flags) -> Config:
    """Defaults, or a preset, or a file; then flags; then --set."""
    path, preset_name = given["config"], given["preset"]
    if path is not None and preset_name is not None:
        raise ConfigError("give a file or a preset, not both", field="--preset")
    config = (
        load_config(path)
        if path is not None
        else preset(preset_name)
        if preset_name is not None
        else Config()
    )
    overrides = {key: given[flag] for flag, key in SETTING_FLAGS.items() if given[flag] is not None}
    for setting in given["settings"] or []:
        key, separator, value = setting.partition("=")
        if not separator:
            raise ConfigError(
                f"{setting!r} is no KEY=VALUE", field="--set", hint="for example --set privacy.epsilon=8"
            )
        overrides[key.strip()] = _toml_value(value.strip())
    return with_overrides(config, overrides)


def _execute(work: Callable[..., RunResult | Comparison], config: Config, given: Flags) -> None:
    folder = given["out"] if given["out"] is not None else free_folder(Path("runs"), config.name)
    with kept_on_interrupt(lambda: _kept(folder)), RoundProgress(quiet=given["quiet"]) as progress:
        result = work(config, out=folder, overwrite=given["overwrite"], progress=progress)
    _present(result, folder, given)


def _resume(given: Flags) -> None:
    for flag in (
        *SETTING_FLAGS,
        *METHOD_FLAGS,
        "methods",
        "config",
        "preset",
        "settings",
        "out",
        "overwrite",
    ):
        if given.get(flag):
            raise ConfigError(
                "cannot be changed when a run is resumed",
                field={"config": "CONFIG.toml", "settings": "--set", "learning_rate": "--lr"}.get(
                    flag, "--" + flag.replace("_", "-")
                ),
                hint="a resumed run goes on with the settings in its folder; start a new one with --out",
            )
    folder: Path = given["resume"]
    with kept_on_interrupt(lambda: _kept(folder)), RoundProgress(quiet=given["quiet"]) as progress:
        result = resume(folder, progress=progress)
    _present(result, folder, given)


def _present(result: RunResult | Comparison, folder: Path, given: Flags) -> None:
    page = write_report(folder)
    if given["as_json"]:
        print_json(result.summary)
    else:
        print_summary(folder)
    if not given["quiet"]:
        messages().print(f"report: {page}", soft_wrap=True)


def _kept(folder: Path) -> str:
    """What an interrupted run or comparison leaves behind, and how to go on."""
    if not (folder / "manifest.json").exists():
        return "nothing was started yet, and nothing is kept"
    return f"every whole round is kept. Go on with: niss run --resume {folder}"


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{text!r} is neither a number nor 'calibrated'", field="--tau2") from None


def _toml_value(text: str) -> Any:
    """A value as it would stand in the file; a bare word is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
