# moved
from niss.attacks.rerun import RerunExperiment  # noqa: F401
