# moved
from niss.mechanism.grid import aliasing_distance, discretisation_delta  # noqa: F401
