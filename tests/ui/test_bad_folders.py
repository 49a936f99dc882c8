"""A folder that somebody else wrote is one bad line at most; the list of all runs stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from niss.errors import RunFolderError
from niss.files import parse_json, read_json, read_json_lines
from ui.conftest import get, write_run


def nested(depth: int) -> str:
    return '{"config": ' + '{"a": [' * depth + "1" + "]}" * depth + "}"


def list_of(server: str) -> dict[str, dict]:
    answer = get(server, "/api/runs")
    assert answer.status == 200
    return {line["name"]: line for line in answer.json()["runs"]}


@pytest.mark.parametrize("depth", [40, 150, 400, 480, 100_000])
@pytest.mark.parametrize("name", ["manifest.json", "result.json", "summary.json"])
def test_a_deeply_nested_file_is_one_bad_line(server: str, runs: Path, depth: int, name: str) -> None:
    bad = write_run(runs / "bad", rounds=5, done=5, finished=True)
    (bad / name).write_text(nested(depth), encoding="utf-8")
    listed = list_of(server)
    assert listed["bad"]["state"] == "unreadable"
    assert listed["done"]["state"] == "finished"
    assert get(server, "/api/run", {"run": "bad"}).status == 404
    assert get(server, "/report", {"run": "bad"}).status == 404


@pytest.mark.parametrize(
    "line",
    [{"round": 10**400}, {"round": 1, "accuracy": 10**400}, {"round": 1, "protocol": 3}, {"round": True}],
    ids=["round", "accuracy", "protocol", "bool"],
)
def test_numbers_beyond_a_float_are_one_bad_line(server: str, runs: Path, line: dict) -> None:
    bad = write_run(runs / "bad", rounds=5, done=0, finished=False)
    (bad / "metrics.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    (bad / "timing.jsonl").write_text('{"seconds": 1e999}\n{"seconds": NaN}\n', encoding="utf-8")
    listed = list_of(server)
    assert "bad" in listed
    assert listed["done"]["state"] == "finished"


def test_whatever_goes_wrong_with_one_folder_the_others_are_listed(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from niss.ui import runs as module

    real = module.read_report_input

    def read(path: Path):
        if path.name == "going":
            raise MemoryError
        return real(path)

    monkeypatch.setattr(module, "read_report_input", read)
    listed = list_of(server)
    assert listed["going"]["state"] == "unreadable"
    assert listed["done"]["state"] == "finished"


def test_files_nested_too_deeply_are_refused_and_others_are_not(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(nested(300), encoding="utf-8")
    with pytest.raises(RunFolderError, match="nested"):
        read_json(path)
    path.write_text(nested(300) + "\n{}\n", encoding="utf-8")
    with pytest.raises(RunFolderError, match="line 1"):
        read_json_lines(path)
    wide = {"a": [[1, [2]] for _ in range(1000)], "b": "[" * 1000}
    assert parse_json(json.dumps(wide)) == wide
    assert parse_json(json.dumps("{" * 1000)) == "{" * 1000
