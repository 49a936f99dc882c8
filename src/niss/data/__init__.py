"""Datasets, and how they are dealt out to clients.

`load_dataset` reads one by name, verified against published checksums; `partition` splits its labels among clients,
`partition_by_owner` gives the samples to the clients they come from.
"""

from __future__ import annotations

from niss.data.dataset import Dataset
from niss.data.partition import partition, partition_by_owner
from niss.data.sources import DatasetInfo, fetch_dataset, list_datasets, load_dataset

__all__ = [
    "Dataset",
    "DatasetInfo",
    "fetch_dataset",
    "list_datasets",
    "load_dataset",
    "partition",
    "partition_by_owner",
]
