"""The sizes of a model, where they are not left as they are."""

from __future__ import annotations

from dataclasses import dataclass, fields

from niss.learning.local import require_whole


@dataclass(frozen=True)
class ModelSettings:
    """Sizes that may be chosen; None leaves the default, and a model refuses those it has no use for.

    hidden     mlp: widths of the hidden layers (200 and 200); () is logistic regression
    width      resnet: channels of the first stage, a multiple of 4 (16); gru, lstm: units (128); transformer (64)
    layers     resnet: blocks in each of the three stages (2); gru, lstm (1) and transformer (2): layers
    heads      transformer: attention heads, a divisor of the width (4)
    embedding  gru, lstm: numbers that stand for a token (16)
    """

    hidden: tuple[int, ...] | None = None
    width: int | None = None
    layers: int | None = None
    heads: int | None = None
    embedding: int | None = None

    def __post_init__(self) -> None:
        for name, value in self.given().items():
            for number in value if isinstance(value, tuple) else (value,):
                require_whole(number, field=f"model.{name}", at_least=1)

    def given(self) -> dict[str, object]:
        """The settings that were chosen, by name."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) is not None
        }
