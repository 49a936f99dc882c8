# moved
from niss.attacks.inversion import InvertSettings, invert_update, total_variation  # noqa: F401
