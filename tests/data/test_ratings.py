"""Ratings as samples of categories, on tables in the shape of the real one."""

from __future__ import annotations

import numpy as np
import pytest

from niss.data.ratings import COLUMNS, rating_samples
from niss.errors import DataError

HEADER = '"","s","d","studage","lectage","service","dept","y"\n'


def table(rows: list[tuple[int, ...]]) -> bytes:
    lines = [
        f'"{number}",' + ",".join(f'"{value}"' for value in row[:-1]) + f",{row[-1]}\n"
        for number, row in enumerate(rows, start=1)
    ]
    return (HEADER + "".join(lines)).encode()


def ratings(counts: list[int]) -> list[tuple[int, ...]]:
    """So many ratings of each student; lecturers and ages have gaps between their numbers."""
    return [
        (
            10 * student,
            7 * (place + 1),
            2 * (1 + place % 4),
            1 + place % 6,
            place % 2,
            1 + place % 14,
            1 + place % 5,
        )
        for student, count in enumerate(counts, start=1)
        for place in range(count)
    ]


def test_values_become_places_and_ratings_begin_at_nought():
    arrays = rating_samples(table(ratings([1, 6])))
    inputs = np.concatenate([arrays.train_inputs, arrays.test_inputs])
    assert inputs.shape == (7, len(COLUMNS))
    assert np.sort(inputs[:, 0]).tolist() == [0] + [1] * 6
    assert np.sort(inputs[:, 1]).tolist() == [0, 0, 1, 2, 3, 4, 5]
    assert set(inputs[:, 2]) == {0, 1, 2, 3}
    labels = np.concatenate([arrays.train_labels, arrays.test_labels])
    assert labels.min() == 0
    assert labels.max() == 4
    assert labels.dtype == inputs.dtype == np.int64


def test_of_every_student_about_a_fifth_is_for_the_test_and_one_at_least():
    counts = [1, 2, 3, 5, 8, 20, 100]
    arrays = rating_samples(table(ratings(counts)))
    assert np.bincount(arrays.test_inputs[:, 0], minlength=7).tolist() == [0, 1, 1, 1, 2, 4, 20]
    assert np.bincount(arrays.train_inputs[:, 0]).tolist() == [1, 1, 2, 4, 6, 16, 80]
    assert arrays.owners is not None
    assert np.array_equal(arrays.owners, arrays.train_inputs[:, 0])


def test_the_split_is_drawn_once_and_for_all_and_loses_nothing():
    rows = ratings([40, 25])
    first, second = rating_samples(table(rows)), rating_samples(table(rows))
    for one, other in zip(first, second, strict=True):
        assert np.array_equal(one, other)
    lecturers = np.concatenate([first.train_inputs, first.test_inputs])[:, :2]
    assert len({tuple(row) for row in lecturers.tolist()}) == 65
    # Not simply the last ones: the table is sorted by lecturer.
    assert first.test_inputs[first.test_inputs[:, 0] == 0][:, 1].min() < 32


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        HEADER.encode(),
        b"a,b\n1,2\n",
        table(ratings([3])) + b'"4","1"\n',
        table([(1, 2, 3, 4, 5, 6, 0)]),
        table([(1, 2, 3, 4, 5, 6, 6)]),
        HEADER.encode() + b'"1","x","2","2","2","2","2",1\n',
        b"\xff" + table(ratings([3])),
    ],
)
def test_a_table_that_is_not_the_ratings_is_refused_with_a_hint(damaged):
    with pytest.raises(DataError) as caught:
        rating_samples(damaged)
    assert caught.value.hint is not None
