"""Reading LEAF's JSON (github.com/TalwalkarLab/leaf): `users`, `num_samples`, and `user_data` with `x` and `y` of each.

LEAF's scripts write any number of such files into the folders `train` and `test` of a dataset.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from niss.errors import DataError

Part = Literal["train", "test"]


class LeafClients:
    """The users in LEAF's files; a user may be in several of them."""

    def __init__(self, train: list[Path], test: list[Path]) -> None:
        self.files: tuple[Path, ...] = (*train, *test)
        self._users: dict[str, dict[str, list[tuple[Any, Any]]]] = {"train": {}, "test": {}}
        for part, paths in (("train", train), ("test", test)):
            for path in paths:
                for user, examples in _read(path).items():
                    self._users[part].setdefault(user, []).extend(examples)

    def clients(self, part: Part) -> list[str]:
        """The names of the users that have examples in this part, sorted."""
        return sorted(user for user, examples in self._users[part].items() if examples)

    def examples(self, part: Part, client: str) -> list[tuple[Any, Any]]:
        """The examples of a user in this part: what stands in `x` with what stands in `y`."""
        return self._users[part].get(client, [])

    def close(self) -> None:
        """Nothing is open: the files were read whole."""


def open_leaf(path: Path) -> LeafClients:
    """The users below a folder with LEAF's `train` and `test`, or in the JSON files of a folder, or in one file."""
    for folder in (path, path / "data"):
        if (folder / "train").is_dir():
            return LeafClients(_json_files(folder / "train"), _json_files(folder / "test"))
    files = _json_files(path) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path} has no JSON files", hint="give the folder that holds LEAF's train and test")
    return LeafClients(files, [])


def _json_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


def _read(path: Path) -> dict[str, list[tuple[Any, Any]]]:
    again = "make it again with LEAF's preprocess.sh"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        users = [str(user) for user in content["users"]]
        pairs = {user: content["user_data"][user] for user in users}
        data = {user: list(zip(pair["x"], pair["y"], strict=True)) for user, pair in pairs.items()}
        counts = dict(zip(users, content.get("num_samples", []), strict=False))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}", hint="check the path") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not JSON as LEAF writes it: {error!r}", hint=again) from error
    for user, count in counts.items():
        if count != len(data[user]):
            raise DataError(
                f"{path}: {user} should have {count} samples, and has {len(data[user])}", hint=again
            )
    return data
