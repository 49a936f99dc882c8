"""Metrics that clients chose to send in the clear, averaged with equal weights."""

from __future__ import annotations

import math

from flwr.app import MetricRecord


def mean_metrics(records: list[MetricRecord | None]) -> MetricRecord:
    """The mean of each number that every client sent; lists and numbers that only some sent are left out."""
    known = [record for record in records if record is not None]
    if not known or len(known) != len(records):
        return MetricRecord()
    means = {}
    for name in known[0]:
        values = [record.get(name) for record in known]
        numbers = [float(value) for value in values if isinstance(value, int | float)]
        if len(numbers) == len(values):
            means[name] = math.fsum(numbers) / len(numbers)
    return MetricRecord(dict(means))
