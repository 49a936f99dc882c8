"""Learning, apart from privacy and aggregation: models, their vectors, local training, evaluation.

`train_client` is the reference: plain code, one client at a time. A `Cohort`
trains many clients at once, on the processor (`niss.learning.cpu`) or a GPU (`niss.learning.cuda`), and tests
prove it equal.
"""

from __future__ import annotations

from niss.learning.cohort import Cohort, Job, choose_device
from niss.learning.local import (
    Evaluation,
    FlatLayout,
    LocalTraining,
    batch_order,
    evaluate,
    seeded_torch,
    threads,
    train_client,
)
from niss.learning.models import (
    Cnn,
    ImageSamples,
    Mlp,
    Samples,
    TokenSamples,
    build_model,
    check_model,
    to_tensor,
)

__all__ = [
    "Cnn",
    "Cohort",
    "Evaluation",
    "FlatLayout",
    "ImageSamples",
    "Job",
    "LocalTraining",
    "Mlp",
    "Samples",
    "TokenSamples",
    "batch_order",
    "build_model",
    "check_model",
    "choose_device",
    "evaluate",
    "seeded_torch",
    "threads",
    "to_tensor",
    "train_client",
]
