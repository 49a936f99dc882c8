# moved
from niss.simulation.cuda.noise import add_shares_on_device  # noqa: F401
