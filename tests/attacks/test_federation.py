"""Where pictures and federations come from, and what is refused before any work."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from niss.attacks.federation import load_pictures, make_federation, other_pictures
from niss.data import Dataset, load_dataset
from niss.randomness import SimStream
from support.refusals import refuses


def test_a_dataset_picture_is_the_stored_one() -> None:
    pictures = load_pictures("mnist-mini:7", count=2)
    stored = load_dataset("mnist-mini")
    assert pictures.name == "mnist-mini:7"
    assert pictures.shape == (1, 28, 28)
    np.testing.assert_array_equal(pictures.pixels, stored.train_images[7:9] / 255.0)
    assert pictures.labels.tolist() == stored.train_labels[7:9].tolist()


def test_inputs_are_scaled_as_in_training() -> None:
    pictures = load_pictures("mnist-mini:0")
    expected = (torch.from_numpy(pictures.pixels) - 0.1307) / 0.3081
    torch.testing.assert_close(pictures.inputs(torch.float64), expected)
    torch.testing.assert_close(pictures.raw().inputs(torch.float64), torch.from_numpy(pictures.pixels))


def test_a_file_becomes_a_square_of_32_in_colour(tmp_path: Path) -> None:
    path = tmp_path / "wide:1.png"
    wide = np.zeros((40, 100, 3), dtype=np.uint8)
    wide[:, 30:70] = (255, 0, 0)
    Image.fromarray(wide).save(path)
    pictures = load_pictures(str(path))
    assert pictures.shape == (3, 32, 32)
    np.testing.assert_allclose(pictures.pixels[0, 0], 1.0)
    np.testing.assert_allclose(pictures.pixels[0, 1:], 0.0)


@pytest.mark.parametrize(
    ("spec", "count", "field"),
    [
        *(("nowhere:3", 1, "--image"), ("missing.png", 1, "--image"), ("mnist-mini:10000", 1, "--image")),
        *(("mnist-mini:-1", 1, "--image"), ("mnist-mini:x", 1, "--image"), ("text.png", 1, "--image")),
        *(("mnist-mini:9999", 2, "--image"), ("black.png", 2, "--batch")),
    ],
)
def test_bad_pictures_are_refused_by_name(
    spec: str, count: int, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.png").write_text("no picture")
    Image.new("RGB", (8, 8)).save("black.png")
    with refuses(field):
        load_pictures(spec, count=count)


def test_a_colour_dataset_will_do_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(1)
    images = generator.integers(256, size=(6, 3, 32, 32), dtype=np.uint8)
    labels = np.arange(6, dtype=np.int64) * 7
    asked: list[tuple[str, bool]] = []

    def load(name: str, *, download: bool) -> Dataset:
        asked.append((name, download))
        return Dataset(name, images, labels, images[:1], labels[:1], 100, (0.5,) * 3, (0.25,) * 3, {})

    monkeypatch.setattr("niss.attacks.federation.load_dataset", load)
    pictures = load_pictures("cifar100:3")
    assert asked == [("cifar100", False)], "an attack does not fetch data by itself"
    np.testing.assert_array_equal(pictures.pixels, images[3:4] / 255.0)
    federation = make_federation(pictures, model="lenet", clients=3, stream=SimStream(1))
    assert federation.updates.shape == (3, 85036)
    assert (federation.pictures.classes, federation.pictures.labels.tolist()) == (100, [21])


def test_others_hold_other_pictures(tmp_path: Path) -> None:
    victim = load_pictures("mnist-mini:0", count=2)
    others = other_pictures(victim, 3, SimStream(1))
    assert [one.pixels.shape for one in others] == [(2, 1, 28, 28)] * 3
    assert len({one.pixels.tobytes() for one in others}) == 3
    path = tmp_path / "file.png"
    Image.new("RGB", (8, 8)).save(path)
    strangers = other_pictures(load_pictures(str(path)), 2, SimStream(1))
    assert [one.pixels.shape for one in strangers] == [(1, 3, 32, 32)] * 2
