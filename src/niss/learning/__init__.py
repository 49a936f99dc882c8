"""Learning, apart from privacy and aggregation: models, their vectors, local training, evaluation.

`train_client` and `clipped_gradient_step` are the reference: plain code, one client at a time. A cohort trains
many clients at once, and tests prove it equal.
"""

from __future__ import annotations

from niss.learning.cohort import Cohort, Job, open_cohort
from niss.learning.device import choose_device
from niss.learning.evaluate import Evaluation, evaluate
from niss.learning.flat import FlatLayout
from niss.learning.images import to_tensor
from niss.learning.local import LocalTraining, batch_order, train_client
from niss.learning.models import Cnn, Mlp, build_model
from niss.learning.per_sample import clipped_gradient_step
from niss.learning.seeding import seeded_torch
from niss.learning.uploads import Clipping, HostUploads, Uploads

__all__ = [
    "Clipping",
    "Cnn",
    "Cohort",
    "Evaluation",
    "FlatLayout",
    "HostUploads",
    "Job",
    "LocalTraining",
    "Mlp",
    "Uploads",
    "batch_order",
    "build_model",
    "choose_device",
    "clipped_gradient_step",
    "evaluate",
    "open_cohort",
    "seeded_torch",
    "to_tensor",
    "train_client",
]
