# moved
from niss.attacks.collude import ColludeExperiment  # noqa: F401
