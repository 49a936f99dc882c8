# moved
from niss.simulation.uploads import Clipping, HostUploads, Rows, Uploads  # noqa: F401
