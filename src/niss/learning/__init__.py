"""Learning, apart from privacy and aggregation: models, their vectors, local training, evaluation.

`train_client` and `clipped_gradient_step` are the reference: plain code, one client at a time. A `Cohort`
trains many clients at once, on the processor (`niss.learning.cpu`) or a GPU (`niss.learning.cuda`), and tests
prove it equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from niss.learning.clipped import ClippedStep, clipped_gradient_step
from niss.learning.cohort import Cohort, Job, choose_device
from niss.learning.flat import FlatLayout
from niss.learning.local import Evaluation, LocalTraining, batch_order, evaluate, seeded_torch, train_client
from niss.learning.models import Cnn, Mlp, build_model, to_tensor

__all__ = [
    "ClippedStep",
    "Cnn",
    "Cohort",
    "Evaluation",
    "FlatLayout",
    "Job",
    "LocalTraining",
    "Mlp",
    "batch_order",
    "build_model",
    "choose_device",
    "clipped_gradient_step",
    "evaluate",
    "seeded_torch",
    "to_tensor",
    "train_client",
]

if TYPE_CHECKING:
    # moved: of `niss.simulation.uploads` now
    from niss.simulation.uploads import Clipping as Clipping
    from niss.simulation.uploads import HostUploads as HostUploads
    from niss.simulation.uploads import Uploads as Uploads

    # moved: `Cohort` takes the same arguments
    open_cohort = Cohort
else:

    def __getattr__(name: str) -> object:
        # moved: as above, for whoever still imports them from here
        if name == "open_cohort":
            return Cohort
        if name not in ("Clipping", "HostUploads", "Uploads"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module("niss.simulation.uploads"), name)
