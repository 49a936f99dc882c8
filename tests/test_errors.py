"""Errors say what is wrong, where, and how to go on; they survive the way between processes."""

from __future__ import annotations

import pickle

import pytest

from niss.errors import (
    ConfigError,
    DataError,
    LocalProtocolError,
    NissError,
    PrivacyError,
    ProtocolError,
    RemoteProtocolError,
    RunFolderError,
)


def test_message_field_and_hint_are_shown() -> None:
    error = ConfigError("must be above 0", field="clip", hint="try 0.5")
    assert str(error) == "clip: must be above 0\nhint: try 0.5"
    assert (error.field, error.hint, error.message) == ("clip", "try 0.5", "clip: must be above 0")
    assert str(ConfigError("broken")) == "broken"


def test_a_config_error_is_a_value_error() -> None:
    assert issubclass(ConfigError, ValueError)


def test_every_family_has_its_own_exit_code() -> None:
    families = [NissError, ConfigError, DataError, PrivacyError, RunFolderError, ProtocolError]
    codes = [family.exit_code for family in families]
    assert len(set(codes)) == len(codes)
    assert 0 not in codes
    assert LocalProtocolError.exit_code == RemoteProtocolError.exit_code == ProtocolError.exit_code


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
