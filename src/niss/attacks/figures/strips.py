# moved
from niss.attacks.drawing import draw_strips  # noqa: F401
