"""Randomness of two kinds that never mix.

`SimStream` is named, seeded and reproducible, for simulations: whoever knows the seed knows the noise.
`SecretStream` expands a secret 32-byte seed into the noise that protects a real client.
"""

from niss.randomness.distance import sampler_distance
from niss.randomness.secret import SecretStream
from niss.randomness.sim import SimStream

__all__ = ["SecretStream", "SimStream", "sampler_distance"]
