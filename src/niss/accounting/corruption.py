# moved
from niss.views.corruption import Corruption, WorstCase, colluding_neighbours  # noqa: F401
