# moved
from niss.local.deployment import Deployment, Settings, free_port  # noqa: F401
