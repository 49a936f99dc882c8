"""The embedded `mnist-mini`: what it holds, and that damage to it is noticed."""

from __future__ import annotations

import hashlib
import io
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from niss.data import PACKAGED, fetch_dataset, load_dataset
from niss.errors import DataError
from niss.randomness import SimStream
from tests.data.conftest import CLASS_COUNTS
from tools.build_mnist_mini import PLACE, pack_npz, stratified_cut


@pytest.fixture(scope="module")
def dataset():
    return load_dataset("mnist-mini", download=False)


def test_sizes_types_and_normalisation(dataset):
    assert dataset.train_images.shape == (10_000, 1, 28, 28)
    assert dataset.test_inputs.shape == (2_000, 1, 28, 28)
    assert dataset.train_images.dtype == np.uint8
    assert dataset.train_labels.dtype == np.int64
    assert dataset.image_shape == (1, 28, 28)
    assert dataset.classes == 10
    pixels = dataset.train_images / 255.0
    assert pixels.mean() == pytest.approx(dataset.mean[0], abs=0.002)
    assert pixels.std() == pytest.approx(dataset.std[0], abs=0.002)


@pytest.mark.parametrize(("part", "official"), [*zip(("train", "test"), CLASS_COUNTS["mnist"], strict=True)])
def test_classes_are_within_one_image_of_their_official_share(dataset, part, official):
    labels = getattr(dataset, f"{part}_labels")
    for count, original in zip(np.bincount(labels).tolist(), official, strict=True):
        assert abs(count - Fraction(len(labels) * original, sum(official))) < 1


def test_the_checksum_is_that_of_the_file_and_of_its_readme(dataset):
    found = hashlib.sha256(PLACE.read_bytes()).hexdigest()
    assert dataset.checksums == {"mnist-mini.npz": found}
    assert found in (PACKAGED / "README.md").read_text(encoding="utf-8")


def test_no_image_is_in_twice(dataset):
    images = np.concatenate([dataset.train_images, dataset.test_inputs])
    assert len({image.tobytes() for image in images}) == len(images)


def test_fetching_it_is_nothing_to_do(tmp_path):
    assert fetch_dataset("mnist-mini", root=tmp_path) == PACKAGED
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_a_damaged_package_is_noticed(damage, tmp_path: Path, monkeypatch):
    copy = tmp_path / "mnist-mini.npz"
    if damage == "flipped":
        raw = bytearray(PLACE.read_bytes())
        raw[1000] ^= 1
        copy.write_bytes(raw)
    monkeypatch.setattr("niss.data.PACKAGED", tmp_path)
    with pytest.raises(DataError, match=r"mnist-mini\.npz") as caught:
        load_dataset("mnist-mini")
    assert "reinstall" in (caught.value.hint or "")


def test_packing_leaves_no_trace_of_time(monkeypatch):
    arrays = {"a": np.arange(6, dtype=np.uint8).reshape(2, 3), "b": np.ones(3, dtype=np.uint8)}
    first = pack_npz(arrays)
    monkeypatch.setattr("time.time", lambda: 2_000_000_000.0)
    assert pack_npz(arrays) == first
    with np.load(io.BytesIO(first), allow_pickle=False) as back:
        assert all(np.array_equal(back[name], array) for name, array in arrays.items())


def test_a_cut_is_stratified_ascending_and_random_within_a_class():
    labels = np.repeat([0, 1, 2], [600, 300, 100])
    cut = stratified_cut(labels, 50, SimStream(seed=1))
    assert np.bincount(labels[cut]).tolist() == [30, 15, 5]
    assert (np.diff(cut) > 0).all()
    assert not np.array_equal(cut, stratified_cut(labels, 50, SimStream(seed=2)))
