# moved
from niss.attacks.experiment import PRESETS, VIEWS  # noqa: F401
from niss.attacks.rounds import Setting, make_setting  # noqa: F401
