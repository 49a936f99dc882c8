"""Datasets in files that the user has, written here as LEAF and TensorFlow Federated write them."""

from __future__ import annotations

import json
import sqlite3
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from niss.data import load_dataset, read_leaf, read_tff
from niss.data.leaf import open_leaf
from niss.data.own import CHARACTERS, END, UNKNOWN
from niss.data.sources import clients_of
from niss.data.tff import parse_example
from niss.errors import ConfigError, DataError
from niss.simulation import make_config
from niss.simulation.materials import gather_together

# LEAF


def leaf_file(path: Path, users: dict[str, tuple[list[Any], list[Any]]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
    }
    path.write_text(json.dumps(content))


def pictures(count: int, seed: int, classes: int = 62) -> tuple[list[list[float]], list[int]]:
    random = np.random.default_rng(seed)
    return random.random((count, 784)).round(4).tolist(), random.integers(0, classes, count).tolist()


@pytest.fixture
def femnist(tmp_path: Path) -> Path:
    """Three writers; one of them in two files, as LEAF shards them."""
    folder = tmp_path / "femnist" / "data"
    leaf_file(folder / "train" / "all_data_0.json", {"f01_41": pictures(3, 1), "f00_12": pictures(2, 2)})
    leaf_file(folder / "train" / "all_data_1.json", {"f01_41": pictures(1, 3), "f05_03": pictures(4, 4)})
    leaf_file(folder / "test" / "all_data_0.json", {"f01_41": pictures(1, 5), "f05_03": pictures(2, 6)})
    return tmp_path / "femnist"


def test_leafs_pictures_are_read_by_writer(femnist):
    dataset = read_leaf(femnist)
    assert (dataset.kind, dataset.shape, dataset.classes, dataset.clients) == ("images", (1, 28, 28), 62, 3)
    assert np.bincount(dataset.owners).tolist() == [2, 4, 4]  # by the names of the writers
    pixels, labels = pictures(2, 2)
    assert dataset.train_labels[:2].tolist() == labels
    assert np.array_equal(dataset.train_images[:2].reshape(2, -1), np.rint(255 * np.array(pixels)))
    assert len(dataset.test_labels) == 3
    assert dataset.mean[0] == pytest.approx(0.5, abs=0.02)
    names = ["data/test/all_data_0.json", "data/train/all_data_0.json", "data/train/all_data_1.json"]
    assert sorted(dataset.checksums) == names
    assert read_leaf(femnist / "data").clients == 3


def test_files_without_a_test_part_have_a_fifth_of_each_writer_held_out(tmp_path):
    users = {"a": pictures(10, 1, 10), "b": pictures(2, 2, 10), "c": pictures(1, 3, 10)}
    leaf_file(tmp_path / "one.json", users)
    dataset = read_leaf(tmp_path / "one.json")
    assert (dataset.clients, dataset.classes) == (2, 10)  # c has nothing to spare
    assert np.bincount(dataset.owners).tolist() == [8, 1]
    assert len(dataset.test_labels) == 3


def test_leafs_plays_have_a_label_at_every_place(tmp_path):
    text = "To be, or not to be: that is the question:\nWhether 'tis nobler in the mind to suffer the slings \xe9"
    x = [text[place : place + 80] for place in range(3)]
    y = [text[place + 80] for place in range(3)]
    leaf_file(tmp_path / "train" / "t.json", {"HAMLET": (x, y), "GHOST": (x[:1], y[:1])})
    leaf_file(tmp_path / "test" / "t.json", {"HAMLET": (x[:1], y[:1])})
    dataset = read_leaf(tmp_path)
    assert (dataset.kind, dataset.shape, dataset.classes) == ("tokens", (80,), 96)
    assert dataset.owners.tolist() == [0, 1, 1, 1]
    spelled = "".join(CHARACTERS[number] for number in dataset.train_labels[3])
    assert spelled == text[3:83]
    assert np.array_equal(dataset.train_inputs[:, 1:], dataset.train_labels[:, :-1])


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        json.dumps({"users": ["a"], "user_data": {}}),
        json.dumps({"users": ["a"], "num_samples": [2], "user_data": {"a": {"x": [[0.0]], "y": [0]}}}),
        json.dumps({"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[0.0]], "y": []}}}),
        json.dumps(
            {"users": ["a"], "num_samples": [2], "user_data": {"a": {"x": [[0.5] * 4, [0.5]], "y": [0, 1]}}}
        ),
        json.dumps(
            {"users": ["a"], "num_samples": [2], "user_data": {"a": {"x": [[7.0], [0.5]], "y": [0, 1]}}}
        ),
        json.dumps(
            {"users": ["a"], "num_samples": [2], "user_data": {"a": {"x": [[0.1], [0.5]], "y": [0, 99]}}}
        ),
        json.dumps(
            {"users": ["a"], "num_samples": [2], "user_data": {"a": {"x": ["ab", "a"], "y": ["c", "d"]}}}
        ),
        json.dumps({"users": [], "num_samples": [], "user_data": {}}),
    ],
)
def test_damaged_json_is_refused(content, tmp_path):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(DataError) as caught:
        read_leaf(tmp_path)
    assert (
        "x.json" in caught.value.message
        or str(tmp_path) in caught.value.message
        or "labels" in caught.value.message
    )


def test_a_path_with_nothing_in_it_is_refused_with_a_hint(tmp_path):
    for path in (tmp_path, tmp_path / "absent", tmp_path / "absent.json"):
        with pytest.raises(DataError) as caught:
            read_leaf(path)
        assert caught.value.hint


# TensorFlow Federated


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def message(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(*, packed: bool = True, **features: bytes | list[float] | list[int]) -> bytes:
    """A serialised tf.train.Example."""
    entries = b""
    for name, value in features.items():
        if isinstance(value, bytes):
            feature = message(1, message(1, value))
        elif isinstance(value[0], float):
            raw = [struct.pack("<f", one) for one in value]
            inside = (
                message(1, b"".join(raw)) if packed else b"".join(varint(1 << 3 | 5) + one for one in raw)
            )
            feature = message(2, inside)
        else:
            whole = [varint(int(one)) for one in value]
            inside = (
                message(1, b"".join(whole)) if packed else b"".join(varint(1 << 3) + one for one in whole)
            )
            feature = message(3, inside)
        entries += message(1, message(1, name.encode()) + message(2, feature))
    return message(1, entries)


@pytest.mark.parametrize("packed", [True, False])
def test_an_example_is_parsed(packed):
    raw = example(packed=packed, pixels=[0.5, 1.0, 0.25], label=[-3, 2**62], title="caf\xe9".encode())
    parsed = parse_example(raw, name="x")
    assert parsed["pixels"].tolist() == [0.5, 1.0, 0.25]
    assert parsed["label"].tolist() == [-3, 2**62]
    assert parsed["title"] == ["caf\xe9".encode()]
    assert parse_example(b"", name="x") == {}


@pytest.mark.parametrize("place", range(1, 40, 3))
def test_an_example_that_is_cut_off_is_refused(place):
    raw = example(pixels=[0.5] * 4, label=[1])
    with pytest.raises(DataError, match=r"no tf.train.Example"):
        parse_example(raw[:-place], name="x")


@pytest.mark.parametrize(
    "raw",
    [
        b"\x0b",  # a group, long gone from protobuf
        b"\x0a" + 11 * b"\xff",  # a length of more than 64 bits
        b"\x0a\x03\x0a\x01\x08",  # an entry that ends in its key
        b"\x0a\x04\x0a\x02\x12\x00",  # an entry without a name
        b"\x08\x01",  # a number where the features should be
    ],
)
def test_other_messages_are_refused(raw):
    with pytest.raises(DataError, match=r"no tf.train.Example"):
        parse_example(raw, name="x")


def sqlite_file(path: Path, clients: dict[tuple[str, str], list[bytes]]) -> Path:
    """As TFF writes them: `client_metadata` and `examples`."""
    with sqlite3.connect(path) as connection:
        connection.execute(
            "CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)"
        )
        connection.execute(
            "CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, num_examples INTEGER)"
        )
        for (split, client), examples in clients.items():
            connection.execute("INSERT INTO client_metadata VALUES (?, ?, ?)", (client, split, len(examples)))
            rows = [(split, client, raw) for raw in examples]
            connection.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows)
    connection.close()
    return path


def emnist(count: int, seed: int) -> list[bytes]:
    pixels, labels = pictures(count, seed)
    return [example(label=[label], pixels=one) for one, label in zip(pixels, labels, strict=True)]


@pytest.fixture
def emnist_file(tmp_path: Path) -> Path:
    clients = {("train", f"f{number:04}"): emnist(2 + number % 3, number) for number in range(7)}
    clients |= {("test", f"f{number:04}"): emnist(1, 100 + number) for number in range(7)}
    return sqlite_file(tmp_path / "emnist_all.sqlite", clients)


def test_pictures_of_tensorflow_federated(emnist_file):
    dataset = read_tff(emnist_file)
    assert (dataset.kind, dataset.shape, dataset.classes, dataset.clients) == ("images", (1, 28, 28), 62, 7)
    assert np.bincount(dataset.owners).tolist() == [2, 3, 4, 2, 3, 4, 2]
    assert dataset.train_labels[:2].tolist() == pictures(2, 0)[1]
    assert len(dataset.test_labels) == 7
    few = read_tff(emnist_file, clients=3)
    assert few.clients == 3
    assert len(few.test_labels) == 3
    assert np.array_equal(read_tff(emnist_file, clients=3).train_labels, few.train_labels)


def test_plays_of_tensorflow_federated(tmp_path):
    speeches = [b"To be, or not to be, that is the question:" for _ in range(10)]
    clients = {
        ("train", "HAMLET"): [example(snippets=one) for one in speeches],
        ("test", "HAMLET"): [example(snippets=one) for one in speeches[:3]],
        ("train", "CUPID"): [example(snippets=b"Hail to thee, worthy Timon, and to all")],
        ("test", "CUPID"): [example(snippets=b"Hail")],
    }
    dataset = read_tff(sqlite_file(tmp_path / "shakespeare.sqlite", clients))
    assert (dataset.kind, dataset.shape, dataset.classes) == ("tokens", (80,), 96)
    assert dataset.clients == 1  # the other has not enough for a sample
    assert (len(dataset.train_labels), len(dataset.test_labels)) == (5, 1)
    spelled = "".join(CHARACTERS[number] for number in dataset.train_inputs.reshape(-1))
    assert "\n".join(one.decode() for one in speeches).startswith(spelled)


def post(tokens: str) -> bytes:
    return example(
        creation_date=b"2009-01-01 00:00:00 UTC",
        score=[3],
        tags=b"python",
        title=b"a",
        tokens=tokens.encode(),
        type=b"answer",
    )


def test_posts_of_stackoverflow(tmp_path):
    words = "how do i read a file in python ?"
    clients = {
        ("train", "00000001"): [post(words)] * 5 + [post("rare")],
        ("heldout", "00000010"): [post("never seen")] * 9,
        ("test", "00000001"): [post("how do you read a file ?")] * 6,
    }
    dataset = read_tff(sqlite_file(tmp_path / "stackoverflow.sqlite", clients))
    assert (dataset.kind, dataset.shape, dataset.clients) == ("tokens", (20,), 1)
    assert dataset.vocabulary[:2] == (UNKNOWN, END)
    assert set(dataset.vocabulary) == {UNKNOWN, END, "rare", *words.split()}
    assert dataset.vocabulary[-1] == "rare"
    assert dataset.classes == len(dataset.vocabulary)
    first = [dataset.vocabulary[number] for number in dataset.train_inputs[0]]
    assert first == [*words.split(), END] * 2
    assert UNKNOWN in {dataset.vocabulary[number] for number in dataset.test_inputs.reshape(-1)}  # "you"


def test_a_file_of_one_part_is_split_by_client(tmp_path):
    clients = {("default_split", name): emnist(5, place) for place, name in enumerate(("a", "b"))}
    dataset = read_tff(sqlite_file(tmp_path / "mine.sqlite", clients))
    assert np.bincount(dataset.owners).tolist() == [4, 4]
    assert len(dataset.test_labels) == 2


@pytest.mark.parametrize(
    "raw", [b"", b"SQLite format 3\0" + bytes(200), b"\xfd7zXZ\0 compressed", b"SQLite format 3\0"]
)
def test_files_that_are_something_else_are_refused_with_a_hint(raw, tmp_path):
    (tmp_path / "x.sqlite").write_bytes(raw)
    with pytest.raises(DataError) as caught:
        read_tff(tmp_path / "x.sqlite")
    assert "decompress" in (caught.value.hint or "")


def test_databases_that_are_something_else_are_refused(tmp_path):
    with sqlite3.connect(tmp_path / "other.sqlite") as connection:
        connection.execute("CREATE TABLE notes (text TEXT)")
    connection.close()
    with pytest.raises(DataError, match="no such table"):
        read_tff(tmp_path / "other.sqlite")
    odd = sqlite_file(tmp_path / "odd.sqlite", {("train", "a"): [example(image=[1, 2])] * 3})
    with pytest.raises(DataError, match="their features are image"):
        read_tff(odd)
    broken = sqlite_file(tmp_path / "broken.sqlite", {("train", "a"): [b"\xff\xff"]})
    with pytest.raises(DataError, match=r"no tf.train.Example"):
        read_tff(broken)


def test_hdf5_of_tensorflow_federated(tmp_path):
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    for part, count in (("train", 3), ("test", 1)):
        with h5py.File(tmp_path / f"fed_emnist_{part}.h5", "w") as file:
            for number in range(2):
                pixels, labels = pictures(count, number)
                group = file.create_group(f"examples/f{number}")
                group["pixels"] = np.array(pixels, dtype=np.float32).reshape(-1, 28, 28)
                group["label"] = np.array(labels, dtype=np.int32)
        with h5py.File(tmp_path / f"shakespeare_{part}.h5", "w") as file:
            file["examples/HAMLET/snippets"] = np.array([b"To be, or not to be" * 9] * count, dtype=object)
    dataset = read_tff(tmp_path / "fed_emnist_train.h5")
    assert (dataset.clients, dataset.shape, len(dataset.test_labels)) == (2, (1, 28, 28), 2)
    assert dataset.train_labels[:3].tolist() == pictures(3, 0)[1]
    plays = read_tff(tmp_path / "shakespeare_train.h5")
    assert (plays.kind, plays.clients, len(plays.train_labels)) == ("tokens", 1, 6)


def test_hdf5_without_h5py_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    (tmp_path / "fed_emnist_train.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    with pytest.raises(DataError, match="needs h5py") as caught:
        read_tff(tmp_path / "fed_emnist_train.h5")
    assert "niss[hdf5]" in (caught.value.hint or "")


# In settings


def test_settings_name_the_files_and_know_their_clients(emnist_file, femnist):
    assert clients_of(f"tff:{emnist_file}") == 7
    config = make_config({"data": {"dataset": f"tff:{emnist_file}"}, "training": {"participants": 4}})
    assert (config.data.split, config.data.clients) == ("natural", 7)
    (materials,) = gather_together([config])
    assert materials.clients.sizes.tolist() == [2, 3, 4, 2, 3, 4, 2]
    fewer = {"dataset": f"leaf:{femnist}", "clients": 2}
    (materials,) = gather_together([make_config({"data": fewer, "training": {"participants": 2}})])
    assert len(materials.clients) == 2
    assert load_dataset(f"leaf:{femnist}", clients=1).clients == 1


def test_files_that_settings_asked_about_are_read_once_and_then_let_go(femnist, monkeypatch):
    opened = []
    monkeypatch.setattr("niss.data.own.open_leaf", lambda path: opened.append(path) or open_leaf(path))
    config = make_config({"data": {"dataset": f"leaf:{femnist}"}, "training": {"participants": 2}})
    gather_together([config])
    assert len(opened) == 1
    leaf_file(femnist / "data" / "train" / "all_data_2.json", {"f09_00": pictures(2, 9)})
    assert load_dataset(f"leaf:{femnist}").clients == 4


def test_more_clients_than_the_files_have_are_refused(femnist):
    config = make_config(
        {"data": {"dataset": f"leaf:{femnist}", "clients": 9}, "training": {"participants": 2}}
    )
    with pytest.raises(ConfigError, match="3 clients, not 9"):
        gather_together([config])


def test_settings_of_a_run_elsewhere_need_no_files():
    data = {"dataset": "tff:/nowhere/emnist.sqlite", "split": "natural", "clients": 7}
    assert make_config({"data": data, "training": {"participants": 4}}).data.clients == 7
    with pytest.raises(DataError, match="there is no /nowhere"):
        make_config({"data": {"dataset": "tff:/nowhere/emnist.sqlite"}})
