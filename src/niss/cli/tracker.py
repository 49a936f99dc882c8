# moved
from niss.cli.services import tracker_command  # noqa: F401
