"""What a sample looks like: all that a model has to know of the data before it is built."""

from __future__ import annotations

from dataclasses import dataclass

from niss.errors import ConfigError
from niss.learning.local import require_whole


@dataclass(frozen=True)
class ImageSamples:
    """Floating-point images of `shape` (channels, height, width), with one label each."""

    shape: tuple[int, int, int]

    def __post_init__(self) -> None:
        if len(self.shape) != 3:
            raise ConfigError(f"must be (channels, height, width), not {self.shape!r}", field="samples.shape")
        for extent in self.shape:
            require_whole(extent, field="samples.shape", at_least=1)


@dataclass(frozen=True)
class TokenSamples:
    """Sequences of `length` tokens 0 .. vocabulary - 1, with one label for each position."""

    length: int
    vocabulary: int

    def __post_init__(self) -> None:
        require_whole(self.length, field="samples.length", at_least=1)
        require_whole(self.vocabulary, field="samples.vocabulary", at_least=2)


Samples = ImageSamples | TokenSamples
