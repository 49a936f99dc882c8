# moved
from niss.ui.app import serve  # noqa: F401
