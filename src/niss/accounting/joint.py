# moved
from niss.views.joint import calibrate_tau2, effective_variance, least_tau2  # noqa: F401
