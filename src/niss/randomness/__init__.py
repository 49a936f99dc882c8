"""Randomness of two kinds that never mix.

`SimStream` is named, seeded and reproducible, for simulations: whoever knows the seed knows the noise.
`SecretStream` expands a secret 32-byte seed into the noise that protects a real client; `add_gaussians`
adds that of many at once, `sampler_distance` and `sampler_factor` bound how far the noise is from ideal Gaussians.
"""

from niss.randomness.secret import SecretStream, add_gaussians, sampler_distance, sampler_factor
from niss.randomness.sim import SimStream, normal_blocks
