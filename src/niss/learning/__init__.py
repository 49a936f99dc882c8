"""Learning, apart from privacy and aggregation: models, their vectors, local training, evaluation.

This is the reference: plain code, one client at a time. Faster engines are proven equal to it.
"""

from __future__ import annotations

from niss.learning.evaluate import Evaluation, evaluate
from niss.learning.flat import FlatLayout
from niss.learning.images import to_tensor
from niss.learning.local import LocalTraining, batch_order, train_client
from niss.learning.models import Cnn, Mlp, build_model
from niss.learning.per_sample import clipped_gradient_step
from niss.learning.seeding import seeded_torch

__all__ = [
    "Cnn",
    "Evaluation",
    "FlatLayout",
    "LocalTraining",
    "Mlp",
    "batch_order",
    "build_model",
    "clipped_gradient_step",
    "evaluate",
    "seeded_torch",
    "to_tensor",
    "train_client",
]
