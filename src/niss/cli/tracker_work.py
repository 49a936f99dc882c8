# moved
from niss.cli.services import tracker_command as run_tracker  # noqa: F401
