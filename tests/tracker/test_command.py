"""`niss tracker`: flags that cannot work are refused before anything starts, and the library stays light."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from niss.cli.services import tracker_command
from niss.errors import ConfigError, NissError
from niss.protocol.keyfile import create_keyfile, load_identity
from niss.tracker.databases import SqliteStore, open_store
from niss.tracker.options import TrackerOptions
from niss.tracker.serve import find_identity
from tracker.harness import SERVER, RedisProcess, free_port, member


def flags(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    store = f"sqlite:///{tmp_path / 'tracker.db'}"
    return {"port": 0, "store": store, "server_key": SERVER.public.hex(), "log_level": "error"} | changes


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"server_key": "xyz"}, "--server-key"),
        ({"server_key": "00" * 32}, "--server-key"),
        ({"server_key": "12"}, "--server-key"),
        ({"ttl": 0.0}, "--ttl"),
        ({"ttl": float("nan")}, "--ttl"),
        ({"tolerance": -1.0}, "--tolerance"),
        ({"max_clients": 0}, "--max-clients"),
        ({"address_rate": -1.0}, "--address-rate"),
        ({"log_level": "loud"}, "--log-level"),
        ({"coalition": ["clinics"]}, "--coalition"),
        ({"coalition": ["=file"]}, "--coalition"),
        ({"store": "postgres://x"}, "--store"),
        ({"store": "sqlite://x"}, "--store"),
        ({"store": "sqlite:///"}, "--store"),
        ({"store": "sqlite:////nowhere/at/all/tracker.db", "identity": "KEY"}, "--store"),
        ({"store": "redis://127.0.0.1:1/0"}, "--identity"),
        ({"tls_cert": Path("cert.pem")}, "--tls-key"),
        ({"tls_key": Path("key.pem")}, "--tls-cert"),
        ({"tls_cert": Path("/no/cert.pem"), "tls_key": Path("/no/key.pem")}, "--tls-cert"),
        ({"admit": Path("/no/file.toml")}, "coalition file"),
        ({"identity": Path("/no/key")}, "there is no key file"),
    ],
)
def test_what_cannot_work_is_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    if changes.get("identity") == "KEY":
        changes = changes | {"identity": tmp_path / "own.key"}
        create_keyfile(changes["identity"], member(1).identity)
    with pytest.raises(NissError, match=named):
        tracker_command(**flags(tmp_path, **changes))


def test_a_file_that_is_no_certificate(tmp_path: Path) -> None:
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nonsense")
    with pytest.raises(ConfigError, match="--tls-cert"):
        tracker_command(**flags(tmp_path, tls_cert=nonsense, tls_key=nonsense))


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="--port"):
        tracker_command(**flags(tmp_path, port=taken.getsockname()[1]))


def test_an_identity_is_made_once_and_kept_beside_the_store(tmp_path: Path) -> None:
    options = TrackerOptions(
        server_key=SERVER.public.hex(), port=0, store=f"sqlite:///{tmp_path / 'tracker.db'}"
    )
    first = find_identity(options)
    kept = tmp_path / "tracker.key"
    assert kept.stat().st_mode & 0o777 == 0o600
    assert find_identity(options).public == first.public == load_identity(kept).public


def test_a_store_of_another_tracker_is_refused(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "tracker.db")
    store.bind("identity", member(3).public)
    store.close()
    with pytest.raises(ConfigError, match="belongs to the tracker"):
        tracker_command(**flags(tmp_path))


def test_a_file_that_is_no_store_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes " * 1000)
    with pytest.raises(ConfigError, match="--store"):
        open_store(f"sqlite:///{path}")
    assert path.read_text() == "my notes " * 1000


def test_a_redis_that_may_forget_is_refused(redis_process: RedisProcess | None) -> None:
    if redis_process is None:
        pytest.skip("needs redis-server")
    import redis

    with redis.Redis.from_url(redis_process.url) as plain:
        for name, bad, good in (
            ("appendfsync", "everysec", "always"),
            ("maxmemory-policy", "allkeys-lru", "noeviction"),
        ):
            plain.config_set(name, bad)
            with pytest.raises(ConfigError, match=name):
                open_store(redis_process.url)
            plain.config_set(name, good)
    open_store(redis_process.url).close()


def test_no_redis_there_is_said() -> None:
    pytest.importorskip("redis")
    with pytest.raises(ConfigError, match="cannot reach Redis"):
        open_store(f"redis://127.0.0.1:{free_port()}/0")
