"""Datasets, and how they are dealt out to clients.

`load_dataset` reads one by name, verified against published checksums; `partition` splits its labels among clients.
"""

from __future__ import annotations

from niss.data.dataset import Dataset
from niss.data.partition import partition
from niss.data.sources import DatasetInfo, fetch_dataset, list_datasets, load_dataset

__all__ = ["Dataset", "DatasetInfo", "fetch_dataset", "list_datasets", "load_dataset", "partition"]
