# moved
from typing import Any

from niss.attacks.inversion import DlgSettings
from niss.attacks.invert import DlgExperiment as _DlgExperiment


def DlgExperiment(*, dlg: DlgSettings, **options: Any) -> _DlgExperiment:
    """For the old command line only: the options of the search are fields of the experiment itself now."""
    return _DlgExperiment(iterations=dlg.iterations, restarts=dlg.restarts, **options)
