# moved
from typing import Any

from niss.attacks.inversion import DlgSettings
from niss.attacks.joint import JointExperiment as _JointExperiment


def JointExperiment(*, dlg: DlgSettings, **options: Any) -> _JointExperiment:
    """For the old command line only: the options of the search are fields of the experiment itself now."""
    return _JointExperiment(iterations=dlg.iterations, restarts=dlg.restarts, **options)
