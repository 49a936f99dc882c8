"""The task: logistic regression on twelve measurements of a patient, without torch.

The patients are made up: measurements are normal, what follows from them is a coin with the chance of a logistic model,
and hospitals differ in size and in whom they treat. An app of your own would read a table that never leaves its site.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from niss.randomness import SimStream
from niss.records import LogisticRegression

FEATURES, HOSPITALS, TESTS = 12, 8, 4_000
SIZES = (900, 800, 700, 500, 400, 300, 250, 150)
"""Patients of each hospital, 4,000 in all: that sum is `records` of the plan, the parts are nobody's business."""
MODEL = LogisticRegression(FEATURES)

Table = tuple[NDArray[np.float64], NDArray[np.int64]]


def _patients(stream: SimStream, count: int, shift: NDArray[np.float64]) -> Table:
    draw = stream.generator()
    slopes = np.array([1.5, -1.2, 1.0, 0.8, -0.8, 0.6, 0.5, -0.4, 0.0, 0.0, 0.0, 0.0])
    measured = draw.normal(size=(count, FEATURES)) + shift
    chance = 1.0 / (1.0 + np.exp(-(measured @ slopes)))
    # Cut where no patient should be, by what is known of such measurements and not by what these show.
    return np.clip(measured, -4.0, 4.0), (draw.random(count) < chance).astype(np.int64)


@cache
def hospital_data(number: int) -> Table:
    """The patients of one hospital; the first treat graver cases, the last lighter ones."""
    stream = SimStream(seed=7).child("hospital", number)
    return _patients(stream, SIZES[number], np.full(FEATURES, 0.3 - 0.6 * number / (HOSPITALS - 1)))


def first_weights() -> list[NDArray[np.float64]]:
    """A row of slopes for each of the two classes, and where they cross: the order of `Records.weights`."""
    return [np.zeros((2, FEATURES)), np.zeros(2)]


def accuracy(weights: list[NDArray[np.float64]]) -> float:
    """The share of test patients about whom the model is right."""
    slopes, offsets = weights
    measured, known = _patients(SimStream(seed=7).child("tests"), TESTS, np.zeros(FEATURES))
    return float(((measured @ slopes.T + offsets).argmax(axis=1) == known).mean())
