# moved
from niss.protocol.shares import (  # noqa: F401
    LONGEST_PLAINTEXT,
    OVERHEAD_BYTES,
    SALT_BYTES,
    TAG_BYTES,
    open_sealed,
    seal,
)
