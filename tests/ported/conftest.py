"""These tests are left out without Flower, as those of `tests/flower` are."""

from flower.conftest import *  # noqa: F403
