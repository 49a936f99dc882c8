"""Settings with other models, one on data that has clients of its own. All their sizes are here, and nowhere else.

Every method is tuned by the same search, at epsilon 3: a trial for each clip, for each further rate, and one more,
which makes 7 (3 for FedAvg, which does not clip). Then everyone runs at three epsilons with three seeds. With 8 methods
that is 52 trials and 66 runs in each setting, so that rounds, participants and epochs are what to cut where time is
short. Files of other sizes do not mix: their base says what they were run with.
"""

from __future__ import annotations

from experiments.reproduce.design import Setting

_ROLES = Setting(
    "shakespeare",
    "natural",
    participants=100,
    clients=600,
    rounds=60,
    epochs=2,
    batch_size=10,
    images=40,
    model="gru",
    width=64,
    clips=(0.1, 0.3, 1.0, 3.0),
    rates=(0.5, 1.0, 2.0),
)
"""Roles of plays, of each at most forty pieces of eighty characters; the next character."""
_PHOTOGRAPHS = Setting(
    "cifar10",
    "iid",
    participants=100,
    clients=1000,
    rounds=30,
    epochs=3,
    batch_size=10,
    images=40,
    model="resnet",
    width=8,
    clips=(0.1, 0.3, 1.0, 3.0),
    rates=(0.03, 0.1, 0.3),
)
"""Photographs, forty to a client; a network of three residual blocks."""
MODELLED = {setting.name: setting for setting in (_ROLES, _PHOTOGRAPHS)}
"""By name: shakespeare-gru, cifar10-resnet."""
