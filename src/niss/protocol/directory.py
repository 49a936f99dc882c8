# moved
from niss.protocol.keys import check_prekey, published  # noqa: F401
