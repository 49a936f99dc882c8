"""Running an inversion on several guesses of the same victim's update, one table row and one strip of pictures each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from niss.attacks.dlg import DlgSettings, Inversion, deep_leakage
from niss.attacks.findings import Findings, Progress, Row
from niss.attacks.plans import Setting
from niss.attacks.scene import VICTIM, Scene
from niss.attacks.scores import score_pictures
from niss.attacks.staging import Staged, relative_error
from niss.randomness import SimStream

FloatArray = NDArray[np.float64]

COLUMNS = {
    "case": "Case",
    "epsilon_joint": "ε joint",
    "noise": "Noise ÷ update",
    "loss": "DLG loss",
    "mse": "MSE",
    "psnr": "PSNR, dB",
    "ssim": "SSIM",
    "label_found": "Label found",
    "iterations": "Iterations",
}


@dataclass(frozen=True)
class Case:
    """A guess of the victim's update, under a name that the table and the figure show."""

    name: str
    setting: Setting
    staged: Staged
    guess: FloatArray


def run_dlg_case(
    case: Case,
    scene: Scene,
    settings: DlgSettings,
    findings: Findings,
    *,
    stream: SimStream,
    device: torch.device,
    progress: Progress,
) -> Row:
    """DLG on one guess; adds its row, curve and frames to the findings."""
    found = deep_leakage(
        scene.as_gradient(case.guess),
        scene.imitation(case.setting.plan),
        scene.pictures,
        settings,
        stream=stream,
        device=device,
        progress=partial(progress, case.name),
    )
    row = case_row(case, scene, found)
    findings.rows.append(row)
    findings.curves.setdefault("losses", {})[case.name] = found.losses
    frames = findings.pictures.setdefault("frames", {})
    frames[case.name] = [(number, shown[0]) for number, shown in found.frames]
    return row


def case_row(case: Case, scene: Scene, found: Inversion) -> Row:
    """Scores of the recovered pictures, beside what was promised and how wrong the guess was."""
    scores = score_pictures(found.pictures, scene.pictures.pixels)
    truth = case.staged.updates[VICTIM]
    joint, marginal = case.setting.claimed_epsilon(case.staged, VICTIM)
    return {
        "case": case.name,
        "method": case.setting.plan.method,
        "epsilon_joint": joint,
        "epsilon_marginal": marginal,
        "noise": relative_error(case.guess, truth),
        "loss": found.losses[-1] if found.losses else float("nan"),
        **scores.to_json(),
        "label_found": sorted(found.labels.tolist()) == sorted(scene.pictures.labels.tolist()),
        "labels": found.labels.tolist(),
        "iterations": len(found.losses),
        "stopped": found.stopped or "all iterations done",
    }
