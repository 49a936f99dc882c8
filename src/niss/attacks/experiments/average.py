# moved
from niss.attacks.average import AverageExperiment  # noqa: F401
