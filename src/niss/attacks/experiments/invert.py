# moved
from typing import Any

from niss.attacks.inversion import InvertSettings
from niss.attacks.invert import InvertExperiment as _InvertExperiment


def InvertExperiment(*, search: InvertSettings, **options: Any) -> _InvertExperiment:
    """For the old command line only: the options of the search are fields of the experiment itself now."""
    return _InvertExperiment(
        iterations=search.iterations,
        restarts=search.restarts,
        total_variation=search.total_variation,
        **options,
    )
