"""The names that options accept, for completion in the shell.

They are written down here because completion must answer at once, and the rooms that define them load torch; a test
compares each with its origin.
"""

from __future__ import annotations

PRESETS = ("demo", "paper")
METHODS = ("fedavg", "dp-fedavg", "central-dp", "niss")
MODELS = ("mlp", "cnn")
SPLITS = ("iid", "shards", "dirichlet")
GRAPHS = ("regular", "complete", "random", "coalition")
DISTORTIONS = ("scalar", "coordinate", "additive")
DEVICES = ("auto", "cpu", "cuda")
RELATIONS = ("zero-out", "replace-one")
MODES = ("tolerate", "repair")
DATASETS = ("mnist-mini", "mnist", "fashion-mnist", "cifar10", "cifar100")
LOG_LEVELS = ("debug", "info", "warning", "error")

ATTACK_VIEWS = ("alone", "joint")
ATTACK_PLANS = ("default", "paper")
ATTACK_MODELS = ("mlp", "cnn", "lenet")

PANELS = tuple(
    f"{dataset}-{model}-{split}"
    for dataset in ("mnist", "cifar10")
    for model in ("mlp", "cnn")
    for split in ("iid", "non-iid")
)
SETTINGS = tuple(
    f"{dataset}-{split}-{unit}"
    for dataset in ("mnist", "cifar10")
    for split in ("iid", "non-iid")
    for unit in ("client", "record")
)
VARIANTS = ("none", "collusion", "tolerate", "repair")
BEYOND_METHODS = ("fedavg", "dp-fedavg", "central-dp", "niss-as-printed", "niss-kappa-1", "niss-planned")
READINGS = ("nbafl", "nbafl-weighted", "one-step", "minibatch", "unit", "clip", "replace", "unit-noise")
FIGURE_4_LEVELS = (
    "fedavg",
    "dp-fedavg",
    "niss",
    "niss-joint",
    "niss-calibrated",
    "client-dp-fedavg",
    "client-niss",
    "client-niss-joint",
    "client-niss-calibrated",
)
