"""Finding, fetching, verifying and loading datasets, on miniatures with the real layouts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from niss.data import PACKAGED, Dataset, fetch_dataset, list_datasets, load_dataset, search_folders
from niss.data.catalog import CATALOG, CIFAR10, MNIST, Digest
from niss.data.formats import IDX_FILES, CifarLayout
from niss.errors import DataError
from support.refusals import refuses


def assert_same(dataset: Dataset, miniature) -> None:
    shape = miniature.spec.image_shape
    assert dataset.image_shape == shape
    for part in ("train", "test"):
        images = getattr(dataset, f"{part}_inputs")
        labels = getattr(dataset, f"{part}_labels")
        assert images.dtype == np.uint8
        assert labels.dtype == np.int64
        assert np.array_equal(images, getattr(miniature, f"{part}_images").reshape(-1, *shape))
        assert np.array_equal(labels, getattr(miniature, f"{part}_labels"))
    assert dataset.checksums == sha256s(miniature.files)


def sha256s(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(raw).hexdigest() for name, raw in files.items()}


@pytest.mark.parametrize(
    "records",
    [None, *({"loose": loose, "label_bytes": count} for loose in (True, False) for count in (1, 2))],
)
def test_idx_files_and_records_loose_or_in_an_archive_are_read(
    idx_miniature, cifar_miniature, tmp_path, records
):
    miniature = idx_miniature() if records is None else cifar_miniature(**records)
    miniature.put_into(tmp_path)
    assert_same(load_dataset(miniature.spec, root=tmp_path, download=False), miniature)


def test_an_archive_with_a_forged_member_is_refused(cifar_miniature, tmp_path):
    miniature = cifar_miniature()
    loose, packed = miniature.spec.file_sets
    forged = (*loose[:-1], replace(loose[-1], digest=Digest("sha256", "0" * 64)))
    miniature.put_into(tmp_path)
    with pytest.raises(DataError, match=r"test_batch.bin in cifar-10-binary.tar.gz .* should be 0000"):
        load_dataset(replace(miniature.spec, file_sets=(forged, packed)), root=tmp_path)


def test_labels_beyond_the_classes_are_refused(idx_miniature, tmp_path):
    miniature = idx_miniature()
    miniature.put_into(tmp_path)
    with pytest.raises(DataError, match=r"labels must lie in 0 \.\. 1"):
        load_dataset(replace(miniature.spec, classes=2), root=tmp_path)


@pytest.mark.parametrize("kind", ["mnist", "cifar10"])
def test_loading_downloads_into_the_cache_once(kind, idx_miniature, cifar_miniature, server, cache):
    """Of CIFAR the archive, where loose files would do."""
    miniature = (idx_miniature if kind == "mnist" else cifar_miniature)(server.url)
    names = set(IDX_FILES) if kind == "mnist" else {"cifar-10-binary.tar.gz"}
    server.files.update(miniature.files)
    seen = set()
    first = load_dataset(miniature.spec, progress=lambda name, *_: seen.add(name))
    assert_same(first, miniature)
    assert seen == {path.name for path in (cache / kind).iterdir()} == names
    assert_same(load_dataset(miniature.spec), miniature)
    assert len(server.requests) == len(names)


def test_a_root_is_where_downloads_go_and_all_that_is_searched(idx_miniature, server, cache, tmp_path):
    miniature = idx_miniature(server.url)
    server.files.update(miniature.files)
    miniature.put_into(cache)
    assert fetch_dataset(miniature.spec, root=tmp_path / "mine") == tmp_path / "mine" / "mnist"
    assert len(server.requests) == 4
    assert_same(load_dataset(miniature.spec, root=tmp_path / "mine", download=False), miniature)


def test_fetching_gets_only_what_is_missing(idx_miniature, server, cache):
    miniature = idx_miniature(server.url)
    server.files.update(miniature.files)
    (miniature.put_into(cache) / IDX_FILES[2]).unlink()
    assert fetch_dataset(miniature.spec) == cache / "mnist"
    assert [name for name, _ in server.requests] == [IDX_FILES[2]]


def test_fetching_what_is_there_verifies_it(idx_miniature, dead_url, cache):
    miniature = idx_miniature(dead_url)
    folder = miniature.put_into(cache)
    assert fetch_dataset(miniature.spec) == folder
    (folder / IDX_FILES[1]).write_bytes(b"damaged")
    with pytest.raises(DataError, match=IDX_FILES[1]):
        fetch_dataset(miniature.spec)


@pytest.mark.parametrize("complete", [True, False])
def test_niss_data_comes_before_the_cache_where_it_is_complete(
    idx_miniature, cache, tmp_path, monkeypatch, complete
):
    miniature = idx_miniature()
    shared, cached = miniature.put_into(tmp_path / "shared"), miniature.put_into(cache)
    if complete:
        (cached / IDX_FILES[0]).write_bytes(b"damaged, but never looked at")
    else:
        (shared / IDX_FILES[0]).unlink()
    monkeypatch.setenv("NISS_DATA", str(tmp_path / "shared"))
    assert_same(load_dataset(miniature.spec, download=False), miniature)
    assert fetch_dataset(miniature.spec) == (shared if complete else cached)


def test_a_damaged_file_is_named_with_both_checksums_and_the_fix(idx_miniature, cache):
    miniature = idx_miniature()
    path = miniature.put_into(cache) / IDX_FILES[3]
    path.write_bytes(b"damaged")
    with pytest.raises(DataError) as caught:
        load_dataset(miniature.spec)
    checksums = miniature.spec.file_sets[-1][3].digest.hexdigest, hashlib.md5(b"damaged").hexdigest()
    assert all(needed in caught.value.message for needed in (str(path), *checksums))
    assert all(fix in (caught.value.hint or "") for fix in (f"delete {path}", "niss data get mnist"))


def test_when_nothing_can_be_reached_the_hint_names_files_and_folder(idx_miniature, dead_url, cache):
    with pytest.raises(DataError) as caught:
        load_dataset(idx_miniature(dead_url).spec)
    hint = caught.value.hint or ""
    assert dead_url in caught.value.message
    for needed in (*IDX_FILES, str(cache / "mnist"), "`niss data get mnist`", "NISS_DATA"):
        assert needed in hint


def test_without_download_the_hint_names_all_ways_to_provide_it(tmp_path, monkeypatch, cache):
    monkeypatch.setenv("NISS_DATA", str(tmp_path / "shared"))
    with pytest.raises(DataError) as caught:
        load_dataset("cifar10", download=False)
    folder = str(cache / "cifar10")
    assert all(here in caught.value.message for here in (str(tmp_path / "shared" / "cifar10"), folder))
    for needed in ("data_batch_3.bin", "test_batch.bin", "cifar-10-binary.tar.gz", folder):
        assert needed in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("typed", "meant"), [("MNIST", "mnist"), ("cifar-10", "cifar10"), ("minst", "mnist")]
)
@pytest.mark.parametrize("call", [load_dataset, fetch_dataset])
def test_an_unknown_name_is_answered_with_the_nearest_and_the_list(call, typed, meant):
    with refuses("dataset") as caught:
        call(typed)
    assert f"did you mean '{meant}'" in (caught.value.hint or "")
    assert "mnist-mini, mnist, fashion-mnist, cifar10, cifar100" in (caught.value.hint or "")


def test_the_list_says_what_is_here_and_where(cache):
    names = ["mnist-mini", "mnist", "fashion-mnist", "cifar10", "cifar100", "shakespeare"]
    assert [(info.name, info.available) for info in list_datasets()] == [
        (name, name == "mnist-mini") for name in names
    ]
    folder = cache / "mnist"
    folder.mkdir(parents=True)
    for name in IDX_FILES:
        (folder / name).touch()
    listed = {info.name: info for info in list_datasets()}
    assert listed["mnist"].available
    assert listed["mnist"].location == folder
    assert listed["fashion-mnist"].location is None
    assert listed["cifar100"].classes == 100
    assert all(info.licence and info.source and info.description for info in listed.values())


def test_the_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert search_folders(MNIST, None) == [tmp_path / ".cache" / "niss" / "mnist"]
    monkeypatch.setenv("NISS_DATA", "~/shared")
    roots = [tmp_path / "shared", tmp_path / ".cache" / "niss"]
    assert search_folders(MNIST, None) == [root / "mnist" for root in roots]
    assert search_folders(MNIST, Path("~/mine")) == [tmp_path / "mine" / "mnist"]


@pytest.mark.parametrize("spec", CATALOG, ids=lambda spec: spec.name)
def test_every_catalog_entry_is_consistent(spec):
    if spec.kind == "images":
        assert len(spec.mean) == len(spec.std) == spec.image_shape[0]
    else:
        assert spec.classes == len(spec.vocabulary)
    if spec.embedded:
        assert all((PACKAGED / file.name).is_file() for (file,) in spec.file_sets)
        return
    for file in spec.file_sets[-1]:
        assert file.urls
        assert all(url.endswith("/" + file.name) and "//" not in url[8:] for url in file.urls)
    if isinstance(spec.layout, CifarLayout):
        assert spec.file_sets[-1][0].name == spec.layout.archive
        assert spec.train_size % len(spec.layout.train) == spec.test_size % len(spec.layout.test) == 0


def test_mnist_falls_back_on_its_second_place_and_cifar_takes_loose_files():
    assert len(MNIST.file_sets[-1][0].urls) == 2
    assert [len(files) for files in CIFAR10.file_sets] == [6, 1]


def numbers(*rows: tuple[int, ...]) -> np.ndarray:
    return np.array(rows, dtype=np.int64)


PIXELS, CLASSES = np.zeros((2, 1, 4, 4), dtype=np.uint8), np.zeros(2, dtype=np.int64)
IMAGES = {
    "name": "x",
    **{f"{part}_inputs": PIXELS for part in ("train", "test")},
    **{f"{part}_labels": CLASSES for part in ("train", "test")},
    **{"classes": 10, "mean": (0.5,), "std": (0.5,)},
}
TEXT = {
    "name": "x",
    "train_inputs": numbers((0, 1, 2), (2, 1, 0)),
    "train_labels": numbers((1, 2, 0), (1, 0, 0)),
    **{f"test_{part}": numbers((0, 0, 0)) for part in ("inputs", "labels")},
    **{"classes": 3, "vocabulary": ("a", "b", "c"), "owners": np.array([1, 0])},
}


def test_a_dataset_knows_its_kind_and_its_clients():
    images, text = Dataset(**IMAGES), Dataset(**TEXT)
    assert (images.kind, images.clients, images.image_shape) == ("images", None, (1, 4, 4))
    assert (text.kind, text.clients, text.shape) == ("tokens", 2, (3,))
    with pytest.raises(DataError, match="not images"):
        _ = text.train_images
