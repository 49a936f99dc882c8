# moved
from niss.views.collusion import calibrate_for, worst_case  # noqa: F401
