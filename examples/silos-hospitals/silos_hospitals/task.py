"""The task: is a tumour benign? Logistic regression on 30 measurements of cell nuclei, without torch.

The 569 patients are those of the Wisconsin breast cancer data, which ships with scikit-learn (UCI Machine Learning
Repository, CC BY 4.0). An app of your own would read a table that never leaves its hospital.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer

from niss.records import LogisticRegression

FEATURES = 30
SIZES = (110, 80, 60, 50, 40, 30, 20, 10)
"""Patients of each hospital, 400 in all: that sum is `records` of the plan, the parts are nobody's business."""
PUBLISHED, TESTS = 69, 100
"""Patients of no hospital: some whose measurements are public, which fix the scale, and others to test on."""
MODEL = LogisticRegression(FEATURES)

Table = tuple[NDArray[np.float64], NDArray[np.int64]]


@cache
def _tables() -> tuple[Table, ...]:
    """The tests, then the hospitals.

    Means and deviations of private patients are private, and costly to hide. So the scale is that of the published
    patients alone; what lies further than three deviations out is cut, to keep gradients short.
    """
    measured, benign = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(7).permutation(len(benign))
    published, *parts = np.split(order, np.cumsum((PUBLISHED, TESTS, *SIZES))[:-1])
    known = measured[published]
    scaled = np.clip((measured - known.mean(axis=0)) / known.std(axis=0), -3.0, 3.0)
    return tuple((scaled[part], benign[part].astype(np.int64)) for part in parts)


def hospital_data(number: int) -> Table:
    """The patients of one hospital: measurements, and 1 where the tumour is benign."""
    return _tables()[1 + number]


def first_weights() -> list[NDArray[np.float64]]:
    """A row of slopes for each of the two classes, and where they cross: the order of `Records.weights`."""
    return [np.zeros((2, FEATURES)), np.zeros(2)]


def accuracy(weights: list[NDArray[np.float64]]) -> float:
    """The share of test patients about whom the model is right."""
    slopes, offsets = weights
    measured, benign = _tables()[0]
    return float(((measured @ slopes.T + offsets).argmax(axis=1) == benign).mean())
