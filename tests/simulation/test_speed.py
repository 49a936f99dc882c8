"""`niss bench` times any model, on made-up data of the kind that it takes."""

from __future__ import annotations

import pytest

from niss.errors import ConfigError
from niss.simulation.speed import Round, measure


@pytest.mark.parametrize("model", ["logistic", "gru"])
def test_every_kind_of_model_is_timed(model: str) -> None:
    speed = measure(Round(model, clients=2, samples=2, epochs=1), repeats=1)
    assert speed.seconds > 0
    assert speed.plain_seconds > 0
    assert speed.parameters > 1000


def test_a_model_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match="no model is called 'gro'"):
        measure(Round("gro"), repeats=1)
