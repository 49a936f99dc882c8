"""Seeded, reproducible randomness for simulations.

`SimStream` names a stream; it holds no position. Asking twice for the generator of the same name
gives the same numbers twice, so a run that is killed and resumed needs no saved generator state:
the numbers of round 17, client 3 depend on the seed and on those names alone.

A `SimStream` must never protect a real client: whoever knows the seed knows the noise.
"""

from __future__ import annotations

import hashlib
import operator

import numpy as np

from niss.errors import ConfigError

_DOMAIN = b"niss.sim-stream.v1"


class SimStream:
    """A reproducible stream of a simulation, addressed by seed and path.

    >>> rounds = SimStream(seed=1).child("round", 3)
    >>> bool((rounds.generator().random(2) == rounds.generator().random(2)).all())
    True

    Children are derived by BLAKE2b over the parent's key and the type-tagged name, so `child("a",
    "b")` and `child("ab")` differ, and so do `child(1)` and `child("1")`.
    """

    __slots__ = ("_key",)

    def __init__(self, seed: int) -> None:
        try:
            number = operator.index(seed)
        except TypeError:
            # Bytes may be the seed of a `SecretStream` gone astray: name their type alone.
            given = type(seed).__name__ if isinstance(seed, bytes | bytearray | memoryview) else repr(seed)
            raise ConfigError(f"must be a whole number, not {given}", field="seed") from None
        if not 0 <= number < 2**63:
            raise ConfigError(f"must be between 0 and 2^63 - 1, not {number}", field="seed")
        self._key = hashlib.blake2b(number.to_bytes(8, "little"), key=_DOMAIN, digest_size=32).digest()

    def child(self, *path: str | int) -> SimStream:
        """The stream of that name below this one."""
        digest = hashlib.blake2b(self._key, key=_DOMAIN, digest_size=32)
        for name in path:
            if isinstance(name, str):
                tag, raw = b"s", name.encode()
            else:
                tag, raw = b"i", operator.index(name).to_bytes(16, "little", signed=True)
            digest.update(tag + len(raw).to_bytes(4, "little") + raw)
        stream = object.__new__(SimStream)
        stream._key = digest.digest()
        return stream

    def generator(self) -> np.random.Generator:
        """A numpy generator (SFC64) at the beginning of this stream."""
        return np.random.Generator(np.random.SFC64(int.from_bytes(self._key, "little")))

    def torch_seed(self) -> int:
        """A 63-bit seed for a local `torch.Generator`; torch itself is never imported here."""
        return int.from_bytes(self._key[:8], "little") >> 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SimStream) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"SimStream({self._key[:4].hex()}...)"
