"""Attacks on what really leaves the devices: each is given an `Observation` and nothing more.

`stage_round` plays a round with the mechanism itself, the estimates guess one client's update from what was seen,
the inversions turn an update back into pictures, and the audit turns success into a lower bound on epsilon.
`experiments` puts these together for the command line, `figures` draws what they found.
"""

from __future__ import annotations

from niss.attacks.canary import AuditBound, CanaryScores, canary_scores, epsilon_bound
from niss.attacks.dlg import DlgSettings, Inversion, deep_leakage
from niss.attacks.estimates import Estimate, estimate_alone, estimate_jointly
from niss.attacks.inverting import InvertSettings, invert_update
from niss.attacks.labels import recover_labels
from niss.attacks.observation import Observation
from niss.attacks.pictures import Pictures, load_pictures
from niss.attacks.reading import read_picture
from niss.attacks.scene import Scene, make_scene
from niss.attacks.scores import PictureScores, score_pictures
from niss.attacks.staging import Staged, recovered_fraction, relative_error, stage_round

__all__ = [
    "AuditBound",
    "CanaryScores",
    "DlgSettings",
    "Estimate",
    "Inversion",
    "InvertSettings",
    "Observation",
    "PictureScores",
    "Pictures",
    "Scene",
    "Staged",
    "canary_scores",
    "deep_leakage",
    "epsilon_bound",
    "estimate_alone",
    "estimate_jointly",
    "invert_update",
    "load_pictures",
    "make_scene",
    "read_picture",
    "recover_labels",
    "recovered_fraction",
    "relative_error",
    "score_pictures",
    "stage_round",
]
