"""A key file is its owner's alone, is never overwritten, and is replaced whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niss.errors import ConfigError, LocalProtocolError, PrivacyError
from niss.protocol.keyfile import create_keyfile, default_keyfile, load_identity, load_keyfile
from niss.protocol.keys import Identity, PrekeyStore
from support.fixed_entropy import FixedEntropy

posix = pytest.mark.skipif(os.name != "posix", reason="file modes mean this on POSIX only")
IDENTITY = Identity.generate(FixedEntropy("north"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mine" / "identity.key"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def filled() -> PrekeyStore:
    store = PrekeyStore()
    store.batch(3, IDENTITY, FixedEntropy())
    return store


def test_identity_and_prekeys_come_back(path: Path) -> None:
    create_keyfile(path, IDENTITY, filled())
    loaded = load_keyfile(path)
    assert loaded.identity.public == load_identity(path).public == IDENTITY.public
    assert loaded.identity.secret_bytes() == IDENTITY.secret_bytes()
    assert loaded.prekeys.to_bytes() == filled().to_bytes()


def test_the_format_never_changes(path: Path) -> None:
    create_keyfile(path, IDENTITY)
    content = path.read_bytes()
    body = b"niss-keyfile/1\n" + bytes(IDENTITY.secret_bytes()) + b"niss-prekeys/1\n" + bytes(8)
    assert content[:-32] == body
    assert len(content) == len(body) + 32


@posix
@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_only_its_owner_can_read_it_whatever_the_umask(path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        made = create_keyfile(path, IDENTITY)
        assert mode(path) == 0o600
        assert mode(path.parent) & 0o077 == 0
        made.save()
        assert mode(path) == 0o600
    finally:
        os.umask(before)


@posix
def test_it_has_its_mode_before_its_first_byte(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    opened = os.open

    def watched(where: Path, flags: int, *rest: int) -> int:
        descriptor = opened(where, flags, *rest)
        if flags & os.O_CREAT:
            assert flags & os.O_EXCL
            modes.append((stat.S_IMODE(os.fstat(descriptor).st_mode), os.fstat(descriptor).st_size))
        return descriptor

    before = os.umask(0)
    try:
        monkeypatch.setattr(os, "open", watched)
        create_keyfile(path, IDENTITY).save()
    finally:
        os.umask(before)
    assert modes == [(0o600, 0), (0o600, 0)]


def test_an_existing_file_is_never_overwritten(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"precious")
    with pytest.raises(ConfigError, match="already exists") as caught:
        create_keyfile(path, IDENTITY)
    assert "--out" in str(caught.value)
    assert path.read_bytes() == b"precious"


@posix
def test_a_link_to_nowhere_is_not_followed(path: Path) -> None:
    path.parent.mkdir()
    path.symlink_to(path.parent / "elsewhere")
    with pytest.raises(ConfigError, match="already exists"):
        create_keyfile(path, IDENTITY)
    assert not (path.parent / "elsewhere").exists()


@posix
@pytest.mark.parametrize("loose", [0o640, 0o604, 0o620, 0o601, 0o644, 0o666])
def test_a_file_that_others_can_reach_is_not_loaded(path: Path, loose: int) -> None:
    create_keyfile(path, IDENTITY)
    path.chmod(loose)
    with pytest.raises(PrivacyError, match=f"{loose:04o}") as caught:
        load_keyfile(path)
    assert caught.value.hint is not None
    assert f"chmod 600 {path}" in caught.value.hint
    path.chmod(0o400)
    load_keyfile(path)


def test_an_erased_prekey_is_gone_from_the_file(path: Path) -> None:
    made = create_keyfile(path, IDENTITY, filled())
    gone = bytes(made.prekeys.private(1))
    assert gone in path.read_bytes()
    made.prekeys.erase(1)
    made.save()
    assert gone not in path.read_bytes()
    assert 1 not in load_keyfile(path).prekeys
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_saving_again_and_again(path: Path) -> None:
    made = create_keyfile(path, IDENTITY)
    for _ in range(3):
        made.prekeys.batch(1, IDENTITY, FixedEntropy())
        made.save()
    assert len(load_keyfile(path).prekeys) == 3


def test_a_file_changed_by_another_process_is_not_replaced(path: Path) -> None:
    create_keyfile(path, IDENTITY, filled())
    mine, theirs = load_keyfile(path), load_keyfile(path)
    theirs.prekeys.erase(0)
    theirs.save()
    mine.prekeys.erase(1)
    with pytest.raises(LocalProtocolError, match="another process"):
        mine.save()
    assert dict(load_keyfile(path).prekeys.fingerprints) == dict(theirs.prekeys.fingerprints)


def test_what_a_crash_left_beside_is_removed(path: Path) -> None:
    made = create_keyfile(path, IDENTITY)
    (path.parent / ".identity.key.new").write_bytes(b"half")
    made.save()
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    load_keyfile(path)


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failed_update_leaves_the_old_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    made = create_keyfile(path, IDENTITY, filled())
    before = path.read_bytes()
    made.prekeys.erase(0)

    def broken(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(*((Path, "replace") if failing == "replace" else (os, "fsync")), broken)
        with pytest.raises(ConfigError, match="No space left"):
            made.save()
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    made.save()
    assert 0 not in load_keyfile(path).prekeys


def test_a_failed_creation_leaves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        with pytest.raises(ConfigError, match="No space left"):
            create_keyfile(path, IDENTITY)
    assert not path.exists()
    create_keyfile(path, IDENTITY)


@posix
def test_file_and_folder_are_synced(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[bool] = []
    synced = os.fsync

    def watched(descriptor: int) -> None:
        kinds.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
        synced(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    made = create_keyfile(path, IDENTITY)
    assert kinds == [False, True]
    made.save()
    assert kinds == [False, True, False, True]


@posix
def test_an_update_through_a_link_keeps_the_link(path: Path, tmp_path: Path) -> None:
    create_keyfile(path, IDENTITY)
    link = tmp_path / "link.key"
    link.symlink_to(path)
    loaded = load_keyfile(link)
    loaded.prekeys.batch(1, IDENTITY, FixedEntropy())
    loaded.save()
    assert link.is_symlink()
    assert len(load_keyfile(path).prekeys) == 1


@settings(deadline=None)
@given(data=st.data())
def test_any_flipped_bit_and_any_cut_is_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("keys") / "identity.key"
    create_keyfile(path, IDENTITY, filled())
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[place:]
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        load_keyfile(path)


def test_what_is_not_there_is_named(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no key file") as caught:
        load_identity(path)
    assert "niss keys new" in str(caught.value)
    tmp_path.chmod(0o700)
    with pytest.raises(ConfigError, match="cannot read"):
        load_identity(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot write"):
        create_keyfile(tmp_path / "file" / "identity.key", IDENTITY)


def test_the_default_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    configured = tmp_path / "configuration"
    assert default_keyfile({"XDG_CONFIG_HOME": str(configured)}) == configured / "niss" / "identity.key"
    usual = tmp_path / ".config" / "niss" / "identity.key"
    for environment in ({}, {"XDG_CONFIG_HOME": ""}, {"XDG_CONFIG_HOME": "relative"}):
        assert default_keyfile(environment) == usual
