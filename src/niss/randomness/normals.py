# moved
from niss.randomness.sim import BLOCK, Floats, _box_muller, normal_blocks  # noqa: F401
