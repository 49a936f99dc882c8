"""Errors say what is wrong, where, and how to go on; they survive the way between processes."""

from __future__ import annotations

import pickle

import pytest

from niss.errors import ConfigError, DataError, NissError, PrivacyError


def test_message_field_and_hint_are_shown() -> None:
    error = ConfigError("must be above 0", field="clip", hint="try 0.5")
    assert str(error) == "clip: must be above 0\nhint: try 0.5"
    assert (error.field, error.hint, error.message) == ("clip", "try 0.5", "clip: must be above 0")
    assert str(ConfigError("broken")) == "broken"
    assert isinstance(error, ValueError)


@pytest.mark.parametrize(
    "error",
    [ConfigError("bad", field="clip", hint="fix it"), PrivacyError("spent", hint="stop"), DataError("gone")],
)
def test_errors_survive_pickling(error: NissError) -> None:
    copied = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert type(copied) is type(error)
    assert str(copied) == str(error)
    assert copied.hint == error.hint
    assert getattr(copied, "field", None) == getattr(error, "field", None)
