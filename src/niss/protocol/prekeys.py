# moved
from niss.protocol.keys import (  # noqa: F401
    LARGEST_BATCH,
    PrekeyStore,
    SignedPrekey,
    x25519_public,
)
