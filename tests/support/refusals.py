"""Refusals by name: an error says which field it is about."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from niss.errors import ConfigError


@contextmanager
def refuses(field: str | None, match: str | None = None) -> Iterator[pytest.ExceptionInfo[ConfigError]]:
    """What is done here raises a ConfigError about this field."""
    with pytest.raises(ConfigError, match=match) as caught:
        yield caught
    assert caught.value.field == field
