# moved
from niss.attacks.experiment import MODELS  # noqa: F401
from niss.attacks.federation import VICTIM  # noqa: F401
from niss.attacks.federation import Federation as Scene  # noqa: F401
from niss.attacks.federation import make_federation as make_scene  # noqa: F401
