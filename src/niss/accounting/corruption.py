# moved
from niss.views.collusion import Corruption, WorstCase, colluding_neighbours  # noqa: F401
