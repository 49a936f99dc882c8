# moved
from niss.protocol.agreement import HASH_BYTES, LONGEST_FIELD, RoundContext  # noqa: F401
from niss.protocol.shares import SEED_BYTES, derive_seed, expand, pair_secret  # noqa: F401
