"""Downloading from a real server on this machine, which fails in all the ways servers fail."""

from __future__ import annotations

import hashlib
import logging
import threading
from pathlib import Path

import pytest

from niss.data.catalog import Digest, SourceFile
from niss.data.download import DownloadError, download_file
from niss.errors import DataError

# Longer than what is read at one go, so that a cut can fall in the middle.
CONTENT = hashlib.shake_256(b"niss").digest(300_001)
DIGEST = Digest("sha256", hashlib.sha256(CONTENT).hexdigest())
NAME = "file.gz"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "root" / "set" / NAME


@pytest.fixture
def part(target: Path) -> Path:
    target.parent.mkdir(parents=True)
    return target.with_name(NAME + ".part")


def get(target: Path, *servers, max_bytes: int = 1 << 20, progress=None) -> None:
    mirrors = tuple(server if isinstance(server, str) else server.url for server in servers)
    download_file(SourceFile(NAME, DIGEST, mirrors, max_bytes), target, progress)


def assert_complete(target: Path) -> None:
    assert target.read_bytes() == CONTENT
    assert [path.name for path in target.parent.iterdir()] == [NAME]


@pytest.mark.parametrize("tells_length", [True, False])
def test_a_whole_file_with_progress(server, target, tells_length):
    server.files[NAME] = CONTENT
    server.tells_length = tells_length
    seen = []
    get(target, server, progress=lambda *report: seen.append(report))
    assert_complete(target)
    total = len(CONTENT) if tells_length else None
    assert {(name, of) for name, _, of in seen} == {(NAME, total)}
    done = [report[1] for report in seen]
    assert done == sorted(done)
    assert done[-1] == len(CONTENT)


def test_a_cut_transfer_goes_on_where_it_broke_off(server, target):
    server.files[NAME] = CONTENT
    server.cuts = [100_000, 50_000]
    get(target, server)
    assert_complete(target)
    assert server.requests == [(NAME, None), (NAME, "bytes=100000-"), (NAME, "bytes=150000-")]


def test_a_server_that_keeps_cutting_is_given_up_and_the_part_stays(server, target):
    server.files[NAME] = CONTENT
    server.cuts = [10] * 50
    with pytest.raises(DownloadError, match="ended after 50 of 300001 bytes"):
        get(target, server)
    assert len(server.requests) == 5
    assert not target.exists()
    assert target.with_name(NAME + ".part").read_bytes() == CONTENT[:50]


def test_an_interrupt_leaves_the_part_for_the_next_try(server, target):
    server.files[NAME] = CONTENT

    def interrupt(_name: str, done: int, _total: int | None) -> None:
        if done > 100_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get(target, server, progress=interrupt)
    kept = target.with_name(NAME + ".part").read_bytes()
    assert 100_000 < len(kept) < len(CONTENT)
    assert CONTENT.startswith(kept)
    assert not target.exists()
    get(target, server)
    assert_complete(target)
    assert server.requests[-1] == (NAME, f"bytes={len(kept)}-")


def test_a_part_that_is_complete_needs_no_network(target, part, dead_url):
    part.write_bytes(CONTENT)
    get(target, dead_url)
    assert_complete(target)


@pytest.mark.parametrize(
    ("faults", "old", "asked_again", "reported"),
    [
        ({}, CONTENT[:1000], False, False),
        ({"knows_ranges": False}, CONTENT[:1000], False, False),
        ({"wrong_range": True}, CONTENT[:1000], True, True),
        ({}, b"x" * 1000, True, True),
        ({}, b"x" * 400_000, True, True),
    ],
    ids=["right", "no ranges", "another range", "wrong beginning", "too long"],
)
def test_a_part_is_gone_on_with_or_discarded_reported_and_fetched_anew(
    server, target, part, faults, old, asked_again, reported, caplog
):
    server.files[NAME] = CONTENT
    vars(server).update(faults)
    part.write_bytes(old)
    with caplog.at_level(logging.WARNING, logger="niss.data"):
        get(target, server)
    assert_complete(target)
    assert server.requests == [(NAME, f"bytes={len(old)}-")] + [(NAME, None)] * asked_again
    assert (server.url + NAME in caplog.text) == reported


@pytest.mark.parametrize(
    ("faults", "content", "asked", "asked_of_the_next"),
    [
        ({"cuts": [100_000, 0]}, CONTENT, 2, "bytes=100000-"),
        ({"cuts": [0, 0], "stalls": True}, CONTENT, 1, None),
        ({}, CONTENT[:-1] + b"\0\0", 1, None),
        ({}, None, 1, None),
    ],
    ids=["keeps cutting", "stalls", "has a wrong file", "lacks it"],
)
def test_the_next_mirror_serves_where_one_is_of_no_use(
    start_server, target, dead_url, faults, content, asked, asked_of_the_next, monkeypatch
):
    first, second = start_server(), start_server()
    vars(first).update(faults)
    first.files.update({} if content is None else {NAME: content})
    second.files[NAME] = CONTENT
    monkeypatch.setattr("niss.data.download._SECONDS", 1.0)
    get(target, dead_url, first, second)
    assert_complete(target)
    assert len(first.requests) == asked
    assert second.requests == [(NAME, asked_of_the_next)]


def test_a_wrong_file_is_discarded_and_both_checksums_are_named(server, target):
    wrong = b"y" + CONTENT[1:]
    server.files[NAME] = wrong
    with pytest.raises(DownloadError) as caught:
        get(target, server)
    for expected in (DIGEST.hexdigest, hashlib.sha256(wrong).hexdigest(), server.url + NAME, "discarded"):
        assert expected in caught.value.message
    assert list(target.parent.iterdir()) == []
    assert len(server.requests) == 1


def test_when_no_mirror_serves_each_is_named_with_its_reason(server, target, dead_url):
    with pytest.raises(DownloadError) as caught:
        get(target, dead_url, server)
    assert dead_url + NAME in caught.value.message
    assert "refused" in caught.value.message
    assert f"{server.url}{NAME}: HTTP 404" in caught.value.message


@pytest.mark.parametrize("tells_length", [True, False])
def test_an_endless_file_is_not_followed(server, target, tells_length):
    server.files[NAME] = CONTENT
    server.tells_length = tells_length
    seen = []
    with pytest.raises(DownloadError, match="more than the 200000 bytes"):
        get(target, server, max_bytes=200_000, progress=lambda _, done, __: seen.append(done))
    assert 0 < max(seen) <= 200_000
    assert list(target.parent.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_an_error_with_a_hint(server, tmp_path):
    (tmp_path / "occupied").write_bytes(b"a file, not a folder")
    server.files[NAME] = CONTENT
    with pytest.raises(DataError, match=r"cannot write .*occupied") as caught:
        get(tmp_path / "occupied" / "set" / NAME, server)
    assert "permissions" in (caught.value.hint or "")
    assert server.requests == []


def test_two_at_once_fetch_the_file_once(server, target):
    server.files[NAME] = CONTENT
    both = threading.Barrier(2)
    errors: list[BaseException] = []

    def work() -> None:
        both.wait()
        try:
            get(target, server)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert_complete(target)
    assert len(server.requests) == 1


def test_a_file_that_appeared_meanwhile_is_verified_not_trusted(server, target, part):
    del part
    target.write_bytes(b"something else")
    with pytest.raises(DataError, match="damaged or is another file"):
        get(target, server)
    assert target.read_bytes() == b"something else"
