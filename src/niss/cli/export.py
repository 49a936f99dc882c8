# moved
from niss.cli.data import export_command  # noqa: F401
