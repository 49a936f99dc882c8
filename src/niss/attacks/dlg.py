# moved
from niss.attacks.inversion import DlgSettings, Inversion, deep_leakage  # noqa: F401
