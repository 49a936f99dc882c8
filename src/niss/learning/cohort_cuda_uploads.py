# moved
from niss.simulation.cuda.uploads import DeviceUploads  # noqa: F401
