"""The paper's Figure 4: Deep Leakage from Gradients against one client's upload, protected in several ways.

The paper's levels are FedAvg, DP-FedAvg and NISS as printed, at its noise, each upload looked at alone. Beside them
stand the views it leaves out: a server that puts all uploads together (and knows the other updates, the worst
case), NISS calibrated for that server, and all of it at a noise that promises something, epsilon = 3 for a whole
client.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.reproduce import paper
from experiments.reproduce.paper import NBAFL, Reading, Setup
from experiments.reproduce.results import (
    ORIGINAL,
    Attempt,
    Leaks,
    keep_pictures,
    read_result,
    require_same_base,
    result_path,
    write_result,
)
from experiments.reproduce.runner import Watch
from niss.attacks.estimates import estimate_alone, estimate_jointly
from niss.attacks.federation import VICTIM, AttackedFederation, load_pictures, make_federation
from niss.attacks.inversion import DeepLeakage, Inversion
from niss.attacks.invert import Case
from niss.attacks.pictures import Pictures, blind_guess, score_pictures
from niss.attacks.rounds import RoundSetting, make_setting
from niss.errors import ConfigError
from niss.learning import choose_device
from niss.methods import METHODS
from niss.randomness import SimStream

_KEPT_LOSSES = 60
_SCORES = ("mse", "psnr", "ssim", "label_found")


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


def level_setting(level: paper.Level, reading: Reading) -> RoundSetting:
    """The plan of a level, the paper's noise scaled to a reading of its sensitivity as in Figure 3."""
    if level.promising:
        setting = make_setting("default", clients=paper.CLIENTS, tau2=None if level.calibrated else 0.0)
    else:
        scale = 1.0 if reading == NBAFL else NBAFL.sigma(Setup()) / reading.sigma(Setup())
        setting = make_setting("paper", clients=paper.CLIENTS, epsilon=Setup().epsilon * scale)
        if level.calibrated:
            setting = setting.with_plan(distortion="additive", tau2=None)
    return setting.with_plan(method=level.method)


def run_picture(
    image: str,
    *,
    cells: Mapping[str, paper.AttackCell],
    out: Path,
    iterations: int = paper.ITERATIONS,
    restarts: int = paper.RESTARTS,
    device: str = "auto",
    progress: Watch | None = None,
) -> Leaks:
    """Attack one picture in every cell that its file still lacks; the file is written after each.

    Recovered pictures are kept beside the results, for the figure. A seed fixes the network, the other clients, the
    noise and the starts of the search, so levels of one seed are paired.
    """
    place, victim = torch.device(choose_device(device, field="--device")), load_victim(image)
    search = DeepLeakage(iterations=iterations, restarts=restarts, frames=paper.FRAMES)
    path = result_path(out, paper.FIGURE_4, paper.picture_name(image))
    base = picture_base(image, victim, search)
    leaks = read_result(path) or Leaks(paper.FIGURE_4, paper.picture_name(image), base)
    require_same_base(leaks, base, path)
    done = {cell.id for cell in leaks.cells}
    federations: dict[tuple[int, float], AttackedFederation] = {}
    for name, (labels, level, reading) in cells.items():
        if name in done:
            continue
        began, stream, setting = time.monotonic(), SimStream(labels["seed"]), level_setting(level, reading)
        key = labels["seed"], setting.learning_rate
        if key not in federations:
            federations[key] = make_federation(
                victim,
                model="lenet",
                clients=paper.CLIENTS,
                stream=stream.child("scene"),
                learning_rate=setting.learning_rate,
            )
        simulated = federations[key].simulate(setting, stream.child("round"))
        estimate = estimate_jointly if level.view == "joint" else estimate_alone
        case = Case.of(level.name, simulated, estimate(simulated.observation, VICTIM).update)
        found = case.invert(
            federations[key],
            search,
            stream=stream.child("dlg"),
            device=place,
            progress=progress and partial(progress, name),
        )
        row = case.row(federations[key], found)
        kept = {ORIGINAL: victim.pixels[0], name: found.frames[-1][1][0]}
        keep_pictures(out, leaks.name, {key: as_bytes(pixels) for key, pixels in kept.items()})
        leaks = leaks.with_cells([_attempt(name, labels, row, found, victim, time.monotonic() - began)])
        write_result(path, leaks)
    return leaks


def picture_base(image: str, victim: Pictures, search: DeepLeakage) -> dict[str, Any]:
    """What all attacks on a picture have in common."""
    return {
        "image": image,
        "label": int(victim.labels[0]),
        "grey_psnr": blind_guess(victim.pixels),
        "model": "lenet",
        "clients": paper.CLIENTS,
        **{name: value for name, value in asdict(search).items() if name != "frames"},
    }


def _attempt(
    name: str,
    labels: dict[str, Any],
    row: dict[str, Any],
    found: Inversion,
    victim: Pictures,
    seconds: float,
) -> Attempt:
    """What is kept of an attack: its row, and some of the losses and frames on the way."""
    kept = np.unique(np.geomspace(1, len(found.losses), _KEPT_LOSSES).round().astype(int))
    private = METHODS[row["method"]].private
    known = {name: row[name] for name in ("noise", "loss", "iterations", "stopped", *_SCORES)}
    for view in ("epsilon_joint", "epsilon_marginal"):
        known[view] = row[view] if private and np.isfinite(row[view]) else None
    return Attempt(
        id=name,
        labels=labels,
        losses=tuple((int(at), float(f"{found.losses[at - 1]:.6g}")) for at in kept),
        frames=tuple((at, score_pictures(shown, victim.pixels).psnr) for at, shown in found.frames),
        seconds=round(seconds, 2),
        **known,
    )


def as_bytes(pixels: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Pixels cut to [0, 1], as 0 .. 255."""
    cut = np.clip(np.nan_to_num(pixels, nan=0.5), 0.0, 1.0)
    return np.asarray(np.rint(255.0 * cut), dtype=np.uint8)
