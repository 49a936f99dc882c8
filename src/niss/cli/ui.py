# moved
from niss.cli.services import ui_command  # noqa: F401
