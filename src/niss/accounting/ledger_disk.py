# moved
from niss.files import sync_folder  # noqa: F401
