"""The paper's Figure 4: Deep Leakage from Gradients against one client's upload, protected in several ways.

The paper's levels are FedAvg, DP-FedAvg and NISS as printed, at its noise, each upload looked at alone. Beside them
stand the views it leaves out: a server that puts all uploads together (and knows the other updates, the worst
case), NISS calibrated for that server, and all of it at a noise that promises something, epsilon = 3 for a whole
client.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.reproduce.design import (
    CLIENTS,
    FIGURE_4,
    FRAMES,
    ITERATIONS,
    LEVELS,
    RESTARTS,
    Level,
    cells_of,
    picture_name,
)
from experiments.reproduce.results import (
    Attempt,
    Leaks,
    pictures_path,
    read_leaks,
    require_same_base,
    result_path,
    write_result,
)
from experiments.reproduce.runner import OutOfTime
from experiments.reproduce.sensitivity import NBAFL, Reading, Setup
from niss.attacks.estimates import estimate_alone, estimate_jointly
from niss.attacks.federation import VICTIM, AttackedFederation, load_pictures, make_federation
from niss.attacks.inversion import DlgSettings, Inversion, deep_leakage
from niss.attacks.invert import Case
from niss.attacks.pictures import Pictures, blind_guess, score_pictures
from niss.attacks.rounds import RoundSetting, make_setting
from niss.errors import ConfigError
from niss.learning import choose_device
from niss.randomness import SimStream

_KEPT_LOSSES = 60

Step = Callable[[int, int, str], None]
"""Called with iterations done, iterations in all, and a note."""
Told = Callable[[str, int, int, str], None]
"""The same, with the name of the cell in front."""


@cache
def load_victim(image: str) -> Pictures:
    """A training picture of a dataset; files are refused, since nobody else could run them again."""
    if Path(image).exists() or ":" not in image:
        raise ConfigError(
            f"expected DATASET:INDEX, got {image!r}",
            field="--image",
            hint="for example mnist:0,cifar10:7,cifar100:4",
        )
    return load_pictures(image)


def level_setting(level: Level, reading: Reading) -> RoundSetting:
    """The plan of a level, the paper's noise scaled to a reading of its sensitivity as in Figure 3."""
    if level.promising:
        setting = make_setting("default", clients=CLIENTS, tau2=None if level.calibrated else 0.0)
    else:
        scale = 1.0 if reading == NBAFL else NBAFL.sigma(Setup()) / reading.sigma(Setup())
        setting = make_setting("paper", clients=CLIENTS, epsilon=Setup().epsilon * scale)
        if level.calibrated:
            setting = setting.with_plan(distortion="additive", tau2=None)
    return setting.with_plan(method=level.method)


def run_picture(
    image: str,
    *,
    out: Path,
    work: Path,
    seeds: Sequence[int] = (1, 2, 3),
    levels: Sequence[Level] = tuple(LEVELS.values()),
    readings: Sequence[Reading] = (NBAFL,),
    iterations: int = ITERATIONS,
    restarts: int = RESTARTS,
    device: str = "auto",
    seconds: float | None = None,
    progress: Told | None = None,
) -> Leaks:
    """Attack one picture in every cell that its file still lacks; the file is written after each.

    Recovered pictures are kept in `work`, for the figure. A seed fixes the network, the other clients, the noise and
    the starts of the search, so levels of one seed are paired.
    """
    until = None if seconds is None else time.monotonic() + seconds
    place, victim = torch.device(choose_device(device, field="--device")), load_victim(image)
    settings = DlgSettings(iterations=iterations, restarts=restarts, frames=FRAMES)
    path = result_path(out, FIGURE_4, picture_name(image))
    base = picture_base(image, victim, settings)
    leaks = read_leaks(path) or Leaks(FIGURE_4, picture_name(image), base)
    require_same_base(leaks, base, path)
    done = {cell.id for cell in leaks.cells}
    federations: dict[tuple[int, float], AttackedFederation] = {}
    for name, (labels, level, reading) in cells_of(levels, readings, seeds).items():
        if name in done:
            continue
        setting = level_setting(level, reading)
        key = labels["seed"], setting.learning_rate
        if key not in federations:
            federations[key] = _federation(victim, *key)
        began = time.monotonic()
        case = _case(level, setting, federations[key], labels["seed"])
        step = _watched(name, until, progress)
        found = _leak(case, federations[key], settings, labels["seed"], place, step)
        attempt = _attempt(name, labels, case, federations[key], found, time.monotonic() - began)
        keep_pictures(work, leaks.name, name, found, victim)
        leaks = leaks.with_cells([attempt])
        write_result(path, leaks)
    return leaks


def picture_base(image: str, victim: Pictures, settings: DlgSettings) -> dict[str, Any]:
    """What all attacks on a picture have in common."""
    return {
        "image": image,
        "label": int(victim.labels[0]),
        "grey_psnr": blind_guess(victim.pixels),
        "model": "lenet",
        "clients": CLIENTS,
        **{name: value for name, value in asdict(settings).items() if name != "frames"},
    }


def _federation(victim: Pictures, seed: int, learning_rate: float) -> AttackedFederation:
    stream = SimStream(seed).child("scene")
    return make_federation(victim, model="lenet", clients=CLIENTS, stream=stream, learning_rate=learning_rate)


def _case(level: Level, setting: RoundSetting, federation: AttackedFederation, seed: int) -> Case:
    """Play the round, and guess the victim's update from what the server sees."""
    simulated = federation.simulate(setting, SimStream(seed).child("round"))
    guess = estimate_jointly if level.view == "joint" else estimate_alone
    return Case(level.name, simulated, guess(simulated.observation, VICTIM).update)


def _leak(
    case: Case,
    federation: AttackedFederation,
    settings: DlgSettings,
    seed: int,
    device: torch.device,
    step: Step,
) -> Inversion:
    return deep_leakage(
        federation.as_gradient(case.guess),
        federation.update_function(case.simulated.plan.plan),
        federation.pictures,
        settings,
        stream=SimStream(seed).child("dlg"),
        device=device,
        progress=step,
    )


def _watched(name: str, until: float | None, progress: Told | None) -> Step:
    def step(done: int, total: int, note: str) -> None:
        if progress is not None:
            progress(name, done, total, note)
        if until is not None and time.monotonic() > until:
            raise OutOfTime(
                "the time given with --stop-after is over; every finished cell is kept",
                hint="give the same command again to go on",
            )

    return step


def _attempt(
    name: str,
    labels: dict[str, Any],
    case: Case,
    federation: AttackedFederation,
    found: Inversion,
    seconds: float,
) -> Attempt:
    row = case.row(federation, found)
    total = len(found.losses)
    kept = np.unique(np.geomspace(1, total, _KEPT_LOSSES).round().astype(int))
    finite = {
        key: row[key] if np.isfinite(row[key]) else None for key in ("epsilon_joint", "epsilon_marginal")
    }
    private = case.simulated.plan.plan.private
    return Attempt(
        id=name,
        labels=labels,
        noise=row["noise"],
        loss=row["loss"],
        losses=tuple((int(at), float(f"{found.losses[at - 1]:.6g}")) for at in kept),
        frames=tuple(
            (at, score_pictures(shown, federation.pictures.pixels).psnr) for at, shown in found.frames
        ),
        iterations=total,
        stopped=row["stopped"],
        mse=row["mse"],
        psnr=row["psnr"],
        ssim=row["ssim"],
        label_found=row["label_found"],
        epsilon_joint=finite["epsilon_joint"] if private else None,
        epsilon_marginal=finite["epsilon_marginal"] if private else None,
        seconds=round(seconds, 2),
    )


def keep_pictures(work: Path, name: str, cell: str, found: Inversion, victim: Pictures) -> None:
    """The original and what was recovered, as 8-bit pixels, for the figure."""
    path = pictures_path(work, name, cell)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.tmp.npz")
    np.savez_compressed(
        partial,
        original=as_bytes(victim.pixels[0]),
        frames=np.stack([as_bytes(shown[0]) for _, shown in found.frames]),
        iterations=np.array([number for number, _ in found.frames]),
    )
    partial.replace(path)


def as_bytes(pixels: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Pixels cut to [0, 1], as 0 .. 255."""
    cut = np.clip(np.nan_to_num(pixels, nan=0.5), 0.0, 1.0)
    return np.asarray(np.rint(255.0 * cut), dtype=np.uint8)
