# moved
from niss.protocol.secret import LARGEST_UINT64, is_uint64, length_prefixed, purpose_bytes, uint64  # noqa: F401
