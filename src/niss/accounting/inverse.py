# moved
from niss.views.covariance import conditional_variance, sampled_variance  # noqa: F401
