"""Stores of both kinds, behind one fixture: whatever is tested with one is tested with the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from niss.tracker.databases import SqliteStore, open_store
from niss.tracker.options import TrackerSettings
from niss.tracker.store import TrackerStore
from tracker.harness import REDIS_MISSING, RedisProcess, Scene, redis_server

OpenStore = Callable[[], TrackerStore]


@pytest.fixture(scope="session")
def redis_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess | None]:
    with redis_server(tmp_path_factory.mktemp("redis")) as process:
        yield process


@pytest.fixture(params=["sqlite", "redis"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty store."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'store.db'}"
    process = request.getfixturevalue("redis_process")
    if process is None:
        pytest.skip(REDIS_MISSING)
    import redis

    with redis.Redis.from_url(process.url) as client:
        client.flushall()
    return str(process.url)


@pytest.fixture
def open_again(store_url: str) -> Iterator[OpenStore]:
    """Opens the store once more, as another process would; all are closed in the end."""
    opened: list[TrackerStore] = []

    def again() -> TrackerStore:
        opened.append(open_store(store_url))
        return opened[-1]

    yield again
    for one in opened:
        one.close()


@pytest.fixture
def make_scene(tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    """Makes a tracker in this process, with the settings it is given, on an SQLite file."""
    made: list[Scene] = []

    def make(**given: object) -> Scene:
        path = tmp_path / f"scene-{len(made)}.db"
        made.append(Scene(lambda: SqliteStore(path, durable=False), **given))
        return made[-1]

    yield make
    for one in made:
        one.store.close()


@pytest.fixture
def scene(make_scene: Callable[..., Scene]) -> Scene:
    return make_scene(settings=TrackerSettings(address_rate=0))


@pytest.fixture
def store(open_again: OpenStore) -> TrackerStore:
    return open_again()
