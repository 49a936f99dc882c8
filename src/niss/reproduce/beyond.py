"""Same epsilon, joint view: every method at epsilon 1, 3 and 8 over the whole training; and the scale of a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from niss.errors import ConfigError
from niss.reproduce.results import Result, read_result, result_path
from niss.reproduce.runner import Watch, run_cells
from niss.reproduce.settings import (
    EPSILONS,
    METHODS,
    VARIANTS,
    Setting,
    Variant,
    find_setting,
    setting_base,
    setting_config,
)
from niss.reproduce.tuning import TUNING, chosen

BEYOND = "beyond"
SCALE = "scale"
SCALES = (30, 100, 1000)


def run_setting(
    setting: Setting,
    *,
    out: Path,
    work: Path,
    epsilons: Sequence[float] = EPSILONS,
    methods: Sequence[str] = tuple(METHODS),
    variants: Sequence[str] = ("none",),
    seeds: Sequence[int] = (1, 2, 3),
    device: str = "auto",
    experiment: str = BEYOND,
    at_once: int | None = None,
    progress: Watch | None = None,
) -> Result:
    """All methods at all epsilons under all variants, with the choices tuned for this setting where there are any."""
    unknown = [name for name in (*methods, *variants) if name not in METHODS and name not in VARIANTS]
    if unknown:
        raise ConfigError(
            f"unknown name {unknown[0]!r}", hint="use one of: " + ", ".join((*METHODS, *VARIANTS))
        )
    # Tuned for rounds of this size; the comparison of sizes takes the same choices for all.
    tuned = read_result(result_path(out, TUNING, setting.name if experiment == SCALE else setting.full_name))
    cells: dict[str, tuple[dict[str, Any], Any]] = {}
    for variant, method, epsilon, seed in product(variants, methods, epsilons, seeds):
        cell = _cell(setting, VARIANTS[variant], method, epsilon, seed, tuned, device)
        if cell is not None:
            identity, labels, config = cell
            cells.setdefault(identity, (labels, config))
    name = setting.full_name if experiment == BEYOND else f"{setting.name}-{setting.participants}"
    return run_cells(
        experiment,
        name,
        setting_base(setting),
        cells,
        out=out,
        work=work,
        at_once=at_once,
        progress=progress,
    )


def _cell(
    setting: Setting,
    variant: Variant,
    method: str,
    epsilon: float,
    seed: int,
    tuned: Result | None,
    device: str,
) -> tuple[str, dict[str, Any], Any] | None:
    """One cell; None where a variant leaves a method as it is, so that its plain cell stands for it."""
    kind = METHODS[method].kind
    if variant.name != "none" and (kind != "niss" or METHODS[method].printed):
        return None
    choice, tuned_for = chosen(tuned, setting, method, epsilon)
    config = setting_config(
        setting, METHODS[method], choice, epsilon=epsilon, variant=variant, seed=seed, device=device
    )
    target = None if kind == "fedavg" else epsilon
    labels = {
        "method": method,
        "epsilon": target,
        "rho": variant.rho,
        "dropout": variant.dropout,
        "mode": variant.mode,
        "variant": variant.name,
        "seed": seed,
        "participations": config.participations,
        "kappa": config.methods[0].kappa if kind == "niss" else None,
        "neighbours": config.methods[0].neighbours if kind == "niss" else None,
        "tuned_for": tuned_for,
        **asdict(choice),
    }
    parts = [variant.name, method, *([] if target is None else [f"epsilon={target:g}"]), f"seed-{seed}"]
    return "/".join(parts), labels, config


def run_scale(
    *,
    out: Path,
    work: Path,
    dataset: str = "mnist",
    sizes: Sequence[int] = SCALES,
    epsilon: float = 3.0,
    seeds: Sequence[int] = (1, 2, 3),
    rounds: int | None = None,
    device: str = "auto",
    methods: Sequence[str] = ("fedavg", "dp-fedavg", "central-dp", "niss-planned"),
    at_once: int | None = None,
    progress: Watch | None = None,
) -> list[Result]:
    """The client unit with m participants a round, out of as many clients, for as many rounds.

    A larger round means more participations of each client, so each upload needs more noise, and it averages over
    more. For a trusted server, and for NISS, the second outweighs the first; for DP-FedAvg, whose m noises all stay
    in the sum, the two cancel: against a trusted server it falls behind by a factor m in variance.
    """
    results = []
    for size in sizes:
        setting = find_setting(f"{dataset}-iid-client", participants=size, rounds=rounds)
        if setting.participants == size:
            results.append(
                run_setting(
                    setting,
                    out=out,
                    work=work,
                    epsilons=(epsilon,),
                    methods=methods,
                    seeds=seeds,
                    device=device,
                    experiment=SCALE,
                    at_once=at_once,
                    progress=progress,
                )
            )
    return results
