# moved
from niss.views.covariance import hidden_noise, per_client  # noqa: F401
