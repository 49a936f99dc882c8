# moved
from niss.attacks.experiment import PRESETS, VIEWS  # noqa: F401
from niss.attacks.rounds import Setting, check_methods, check_view, make_setting  # noqa: F401
