"""The real datasets, where the machine has them: NISS_DATA names a folder with <name>/<file>."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from niss.data import find, load_dataset
from niss.data.catalog import spec_named
from tests.data.conftest import CLASS_COUNTS
from tools.build_mnist_mini import cut_mini

# Read at import: the tests themselves run with NISS_DATA taken away.
FULL_DATA = os.environ.get("NISS_DATA", "")


def load(name: str):
    if not FULL_DATA:
        pytest.skip("NISS_DATA is not set")
    if find(spec_named(name), Path(FULL_DATA)) is None:
        pytest.skip(f"NISS_DATA has no {name}")
    return load_dataset(name, root=Path(FULL_DATA), download=False)


@pytest.mark.parametrize("name", CLASS_COUNTS)
def test_sizes_class_counts_checksums_and_normalisation(name):
    dataset = load(name)
    spec = spec_named(name)
    assert dataset.train_images.shape == (spec.train_size, *spec.image_shape)
    assert dataset.test_inputs.shape == (spec.test_size, *spec.image_shape)
    train, test = CLASS_COUNTS[name]
    assert np.bincount(dataset.train_labels).tolist() == train
    assert np.bincount(dataset.test_labels).tolist() == test
    for file, found in dataset.checksums.items():
        assert file in {expected.name for files in spec.file_sets for expected in files}
        assert len(found) == 64
    for channel in range(spec.image_shape[0]):
        histogram = np.bincount(dataset.train_images[:, channel].ravel(), minlength=256)
        levels = np.arange(256) / 255.0
        mean = np.average(levels, weights=histogram)
        spread = np.sqrt(np.average((levels - mean) ** 2, weights=histogram))
        assert mean == pytest.approx(dataset.mean[channel], abs=1e-3)
        assert spread == pytest.approx(dataset.std[channel], abs=1e-3)


def test_mnist_mini_is_the_cut_of_the_official_files():
    arrays, embedded = cut_mini(load("mnist")), load_dataset("mnist-mini")
    assert np.array_equal(arrays["train_images"], embedded.train_images[:, 0])
    assert np.array_equal(arrays["train_labels"], embedded.train_labels)
    assert np.array_equal(arrays["test_images"], embedded.test_inputs[:, 0])
    assert np.array_equal(arrays["test_labels"], embedded.test_labels)


def test_shakespeare_has_its_roles():
    dataset = load("shakespeare")
    assert (dataset.clients, dataset.classes, len(dataset.vocabulary)) == (627, 66, 66)
    assert dataset.train_inputs.shape == dataset.train_labels.shape == (40_179, 80)
    assert dataset.test_inputs.shape == dataset.test_labels.shape == (10_059, 80)
    assert np.array_equal(dataset.train_inputs[:, 1:], dataset.train_labels[:, :-1])
    sizes = np.bincount(dataset.owners)
    assert (sizes.min(), sizes.max()) == (10, 614)
    assert set(np.unique(dataset.train_inputs)) == set(range(66))
    spelled = "".join(dataset.vocabulary[number] for number in dataset.train_inputs.reshape(-1))
    assert "To be, or not to be,--that is the question:--" in spelled
    for never in ("ACT ", "SCENE", "Exeunt", "Re-enter", "Gutenberg", "PERSONS REPRESENTED", "[", "Dramatis"):
        assert never not in spelled
