"""What the server answers, and to whom."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from niss.accounting import PlanQuestion
from niss.data.catalog import CATALOG, spec_named
from niss.learning.models import accepts
from niss.methods import METHODS
from niss.methods.look import SERIES
from niss.settings import described
from niss.simulation.inputs import sample_spec
from niss.svg import MOST_BANDS
from niss.ui import app as ui_app
from niss.ui.pages import in_code
from ui.conftest import cli_plan, get, play_round, serving, write_run

RECORDS = {"unit": "record", "participants": 10, "records": 60_000, "batch": 0.05, "rounds": 600}
CARRIED = {"participants": 20, "carry": "true", "clients": 100, "rounds": 30}


@pytest.mark.parametrize(
    ("question", "verdict"),
    [
        ({"participants": 12}, None),
        (
            {
                "participants": 30,
                "epsilon": 8,
                "delta": 1e-6,
                "rounds": 99,
                "participations": 30,
                "clip": 2.5,
            },
            None,
        ),
        ({"participants": 40, "neighbours": 9, "collusion": 0.1, "dropout": 0.05, "kappa": 2.5}, None),
        ({"participants": 25, "dropout": 0.1, "mode": "repair", "relation": "replace-one"}, None),
        ({"participants": 1_000_000, "collusion": 0.2}, None),
        ({"participants": 200, "clients": 900, "rounds": 30}, None),
        ({"unit": "record", "participants": 8, "records": 900, "batch": 0.5, "rounds": 4}, None),
        (RECORDS | {"parameters": 26_010, "epsilon": 1}, "good"),
        (RECORDS | {"parameters": 2_000_000, "epsilon": 1}, "noisy"),
        (CARRIED, None),
        (
            CARRIED
            | {"clients": 110, "pattern": "any", "collusion": 0.1, "dropout": 0.05, "mode": "repair"}
            | {"relation": "replace-one", "clip": 0.5},
            None,
        ),
        ({"participants": 10, "epsilon": 8, "rounds": 10, "clip": 2, "parameters": 62_000}, "hopeless"),
        ({"participants": 500, "epsilon": 8, "rounds": 10, "clip": 2, "parameters": 2_000}, "good"),
        (CARRIED | {"clip": 0.5, "parameters": 9_000_000}, "hopeless"),
    ],
)
def test_the_plan_is_that_of_the_command_it_shows_and_of_the_python_lines(
    server: str, question: dict[str, Any], verdict: str | None
) -> None:
    answer = get(server, "/api/plan", question).json()
    assert answer["plan"] == cli_plan(answer["command"])
    made_by: dict[str, Any] = {}
    exec(answer["python"].replace("print(", "made = ("), made_by)  # noqa: S102
    assert json.loads(json.dumps(made_by["made"])) == answer["plan"]
    if verdict is not None:
        assert answer["plan"]["outlook"]["verdict"] == verdict
        assert f"--parameters {question['parameters']}" in answer["command"]


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ({"participants": 10, "parameters": 0}, "parameters: Input should be greater than or equal to 1"),
        ({"participants": 1}, "greater than or equal to 2"),
        ({"participants": 10, "collusion": 0.95}, "infeasible"),
        ({"participants": 10, "collusion": 0.95}, "lower it"),
        ({"participants": 10, "epsilon": "nan"}, "epsilon"),
        ({"participants": 10, "rounds": 3, "participations": 9}, "9 participations do not fit into 3 rounds"),
        ({"participants": 10, "clients": 100}, "rounds: is missing"),
        ({"participants": 10, "clients": 9, "rounds": 5}, "clients: 9 cannot fill a round of 10"),
        (
            {"participants": 10, "clients": 100, "rounds": 30, "participations": 3},
            "participations: follows from rounds, clients and participants",
        ),
        ({"participants": 10, "pattern": "any"}, "belongs to carried shares"),
        ({"participants": 10, "clients": 100, "carry": "true"}, "rounds"),
        (
            {"participants": 10, "clients": 100, "carry": "true", "rounds": 9, "neighbours": 4},
            "with carried shares",
        ),
        ({"participants": 10, "clients": 100, "carry": "true", "rounds": 5000}, "at most 1000 rounds"),
        ({"participants": 10, "clients": 95, "carry": "true", "rounds": 9}, "whole cohorts of 10"),
        ({"participants": "many"}, "participants"),
        ({}, "participants"),
        ({"participants": 10, "colusion": 0.1}, "colusion"),
        ({"participants": 10, "mode": "pray"}, "mode"),
    ],
)
def test_a_fault_is_explained(server: str, question: dict[str, Any], said: str) -> None:
    answer = get(server, "/api/plan", question)
    assert answer.status == 422
    fault = answer.json()
    assert said in (fault["hint"] if said == "lower it" else f"{fault['field']}: {fault['message']}")


# Huge, negative, not a number, empty, very long.
ODD = (
    "1" + 18 * "0",
    "1" + 400 * "0",
    "1" + 5000 * "0",
    "1e308",
    "1e-320",
    "-1",
    "nan",
    "inf",
    "",
    9000 * "x",
)


@pytest.mark.parametrize("base", [{"participants": 20}, CARRIED], ids=["alone", "carried"])
@pytest.mark.parametrize("name", [field.name for field in fields(PlanQuestion)])
def test_no_value_of_a_query_is_an_error_of_the_server(server: str, name: str, base: dict[str, Any]) -> None:
    for odd in ODD:
        answer = get(server, "/api/plan", base | {name: odd})
        assert answer.status in (200, 422), odd
        assert answer.status == 200 or answer.json()["message"]
        assert odd == "1e-320" or answer.status == 422 or name in ("clients", "neighbours"), odd


def test_a_setting_that_is_given_twice_is_refused(server: str) -> None:
    answer = get(server, "/api/plan?participants=20&epsilon=1&epsilon=8")
    assert (answer.status, answer.json()["field"]) == (422, "epsilon")


@pytest.mark.parametrize(
    "question",
    [
        {"participants": 200, "tau2": 0},
        {"participants": 200, "dropout": 1e-320},
        {"participants": 1_000_000_000, "epsilon": 1e-6, "clip": 1e-9, "kappa": 1e6, "rounds": 1_000_000},
        {"participants": 2, "epsilon": 1e6, "clip": 1e9, "kappa": 1e-6, "tau2": 1e9, "parameters": 10**15},
        CARRIED | {"participants": 2, "clients": 1_000_000_000},
        CARRIED | {"epsilon": 1e-6, "clip": 1e-9, "kappa": 1e6},
        CARRIED | {"epsilon": 1e6, "clip": 1e9, "dropout": 0.999},
    ],
)
def test_the_ends_of_all_ranges_have_a_plan(server: str, question: dict[str, Any]) -> None:
    assert get(server, "/api/plan", question).status == 200


def test_plans_that_take_long_keep_nobody_waiting(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but one turn are taken: another question is answered. With the last one taken it is turned away."""
    go_on, begun = threading.Event(), threading.Semaphore(0)

    def slow(question: PlanQuestion) -> dict[str, Any]:
        if question.participants >= 900:
            begun.release()
            assert go_on.wait(60)
        return {"asked": question.participants}

    monkeypatch.setattr(ui_app, "answer", slow)
    monkeypatch.setattr(ui_app, "_LONGEST_WAIT", 0.05)
    with ThreadPoolExecutor(ui_app._PLANS_AT_ONCE) as others:
        try:
            sent = []
            for number in range(ui_app._PLANS_AT_ONCE):
                assert get(server, "/api/plan", {"participants": 10}).json() == {"asked": 10}
                sent.append(others.submit(get, server, "/api/plan", {"participants": 900 + number}))
                assert begun.acquire(timeout=60)
            turned_away = get(server, "/api/plan", {"participants": 10})
            assert turned_away.status == 503
            assert "ask again" in turned_away.json()["hint"]
            assert get(server, "/api/runs").status == 200
        finally:
            go_on.set()
        assert {answer.result().status for answer in sent} == {200}
    assert get(server, "/api/plan", {"participants": 10}).status == 200


def test_the_runs_are_listed_with_how_far_they_have_come(server: str, runs: Path) -> None:
    listed = {run["name"]: run for run in get(server, "/api/runs").json()["runs"]}
    assert set(listed) == {"done", "going", "deep/inner", "broken"}
    assert listed["done"]["state"] == "finished"
    assert (listed["done"]["best"]["accuracy"], listed["done"]["best"]["epsilon_spent"]) == (0.8, "3.00")
    assert [listed["going"][key] for key in ("state", "rounds_done", "rounds")] == ["running", 3, 10]
    assert listed["broken"]["state"] == "unreadable"
    assert "summary.json" in listed["broken"]["message"]
    long_ago = time.time() - 7200
    for name in ("metrics.jsonl", "manifest.json"):
        os.utime(runs / "going" / name, (long_ago, long_ago))
    listed = {run["name"]: run for run in get(server, "/api/runs").json()["runs"]}
    assert listed["going"]["state"] == "stopped"
    stopped = get(server, "/api/run", {"run": "going"}).json()
    assert stopped["state_words"] == "stopped before its end, silent for 2 h"
    assert f"niss run --resume {runs / 'going'}" in stopped["html"]


def test_the_live_view_follows_the_run(server: str, runs: Path) -> None:
    before = get(server, "/api/run", {"run": "going"}).json()
    assert before["html"].count("Round 3<") == 2
    assert before["seconds_left"] == pytest.approx(3.5)
    assert before["state_words"] == "training round 4 of 10"
    assert before["methods"][0]["noise"] == pytest.approx([1.1e-4, 1.0e-4, 3.0e-4])
    play_round(runs / "going", 4)
    with (runs / "going" / "metrics.jsonl").open("a", encoding="utf-8") as stream:
        stream.write('{"round": 5, "accu')
    after = get(server, "/api/run", {"run": "going"}).json()
    assert after["methods"][0]["rounds_done"] == 4
    assert after["html"].count("Round 4<") == 2
    assert "cut off" in after["notes"][0]


def test_the_time_left_is_that_of_all_methods_and_the_best_protected_one_leads_the_list(
    server: str, runs: Path
) -> None:
    """An unprotected method is better, a private one has no guarantee against the server, and one has only begun."""
    methods = [{"name": name} for name in ("fedavg", "central-dp", "niss")]
    for number, method in enumerate(methods):
        folder = write_run(runs / "both" / method["name"], rounds=10, done=(2, 3, 7)[number], finished=False)
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["config"]["methods"] = [method]
        (folder / "manifest.json").write_text(json.dumps(manifest))
    manifest["config"]["methods"], manifest["kind"] = methods, "comparison"
    (runs / "both" / "manifest.json").write_text(json.dumps(manifest))
    (runs / "both" / "fedavg" / "metrics.jsonl").write_text('{"round": 2, "accuracy": 0.99}\n')
    view = get(server, "/api/run", {"run": "both"}).json()
    assert view["seconds_left"] == pytest.approx(0.5 * (8 + 7 + 3))
    assert (view["title"], view["state_words"]) == (
        "both: 3 methods on the same clients",
        "training round 3 of 10",
    )
    answer = get(server, "/api/runs").json()
    (listed,) = (run for run in answer["runs"] if run["name"] == "both")
    assert listed["best"]["label"] == "niss"
    assert "over the five before" not in answer["html"]
    metrics = runs / "both" / "niss" / "metrics.jsonl"
    lines = [json.loads(line) | {"carried_variance": 1e-6} for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "% over the five before)" in get(server, "/api/runs").json()["html"]
    play = write_run(runs / "new", rounds=10, done=0, finished=False)
    assert get(server, "/api/run", {"run": play.name}).json()["state_words"] == "training round 1 of 10"


def test_a_method_has_its_own_colour_on_the_live_page(server: str) -> None:
    chart = get(server, "/api/run", {"run": "going"}).json()["html"]
    assert f'stroke="var(--series-{SERIES.index(METHODS["niss"].look.colour) + 1}, ' in chart
    assert "(unprotected)" not in chart


def test_a_long_run_is_thinned_out(server: str, runs: Path) -> None:
    write_run(runs / "long", rounds=1000, done=1000, finished=False)
    chart = get(server, "/api/run", {"run": "long"}).json()["html"]
    assert chart.count('class="band"') == 2 * MOST_BANDS
    assert "Round 1000<" in chart


def test_the_report_is_drawn_afresh_and_allows_no_script(server: str, runs: Path) -> None:
    (runs / "done" / "report.html").write_text("<script>alert(1)</script>", encoding="utf-8")
    answer = get(server, "/report", {"run": "done"})
    assert answer.status == 200
    assert "<script" not in answer.text
    assert "script-src" not in answer.headers["content-security-policy"]
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")


@pytest.mark.parametrize(
    "name", ["../runs/done", "..", ".", "", "/etc", "done/../done", "no-run", "done\x00", "link"]
)
def test_no_name_leads_out_of_the_folder(server: str, runs: Path, tmp_path: Path, name: str) -> None:
    outside = write_run(tmp_path / "outside", rounds=1, done=1, finished=True)
    (runs / "link").symlink_to(outside)
    for page in ("/report", "/api/run"):
        assert get(server, page, {"run": name}).status == 404


@pytest.mark.parametrize(
    "path",
    [
        *("/assets/../app.py", "/assets/%2e%2e/app.py", "/assets/..%2fapp.py", "/assets/planner.html"),
        "/etc/passwd",
    ],
)
def test_only_the_named_assets_are_served(server: str, path: str) -> None:
    assert get(server, path).status == 404


@pytest.mark.parametrize("page", ["/", "/runs", "/live?run=going"])
def test_pages_load_only_what_is_served_here(server: str, page: str) -> None:
    answer = get(server, page)
    policy = answer.headers["content-security-policy"]
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert not re.search(r"https?://", answer.text)
    assert not re.search(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=", answer.text)
    for path in re.findall(r'(?:src|href)="(/assets/[^"]+)"', answer.text):
        asset = get(server, path)
        assert asset.status == 200
        for imported in re.findall(r'from "([^"]+)"', asset.text):
            assert get(server, imported).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "192.168.1.7", "", "[::2]:80"]
)
def test_another_host_name_is_refused(server: str, host: str) -> None:
    for path in ("/", "/api/runs", "/assets/style.css"):
        answer = get(server, path, host=host)
        assert answer.status == 421
        assert "content-security-policy" in answer.headers


def test_the_names_of_this_machine_are_known_and_beyond_loopback_all_addresses(
    server: str, runs: Path
) -> None:
    for host in ("127.0.0.1:8765", "localhost:9", "localhost", "[::1]:8765", "LOCALHOST"):
        assert get(server, "/", host=host).status == 200
    with serving(runs, host="0.0.0.0") as server:
        assert get(server, "/", host="192.168.1.7:8765").status == 200
        assert get(server, "/", host="evil.example").status == 421


def test_nothing_can_be_changed_and_other_sites_cannot_make_it_compute(server: str) -> None:
    assert get(server, "/api/plan", method="POST").status == 405
    for path in ("/api/plan?participants=10", "/api/runs", "/api/run?run=done", "/report?run=done"):
        assert get(server, path, sec_fetch_site="cross-site").status == 403, path
        assert get(server, path, sec_fetch_site="same-origin").status == 200, path
    assert get(server, "/", sec_fetch_site="cross-site").status == 200, "a link may lead here"


def test_a_folder_that_does_not_exist_holds_no_runs(tmp_path: Path) -> None:
    with serving(tmp_path / "nowhere") as server:
        assert get(server, "/api/runs").json()["runs"] == []


PEOPLE_ALONE = {"clients", "carry", "pattern", "for_", "relation"}
RECORDS_ALONE = {"records", "batch"}


@pytest.mark.parametrize(("unit", "others"), [("client", RECORDS_ALONE), ("record", PEOPLE_ALONE)])
def test_every_setting_that_belongs_to_what_is_hidden_has_its_control_and_no_other(
    server: str, unit: str, others: set[str]
) -> None:
    page = get(server, f"/?unit={unit}").text
    # What a given distortion promises, and participations that are given, are asked on the command line.
    hidden = others | {"tau2", "participations"}
    for setting in described(PlanQuestion):
        assert (f'name="{setting.name}"' in page) == (setting.name not in hidden), setting.name
        if setting.name not in hidden and setting.name != "unit":
            assert in_code(setting.help) in page
            for word in setting.choices:
                assert f'<option value="{word}">' in page
    assert f'<input type="hidden" name="unit" value="{unit}">' in page
    assert f'data-unit="{unit}" aria-current="true"' in page
    assert "`" not in page


def test_who_names_nothing_that_can_be_hidden_is_asked_about_people(server: str) -> None:
    assert get(server, "/").text == get(server, "/?unit=nobody").text == get(server, "/?unit=client").text


def test_words_between_backticks_are_code_and_nothing_else_is() -> None:
    assert in_code("none: `repair`, <b>") == "none: <code>repair</code>, &lt;b&gt;"
    assert in_code("plain") == "plain"


def test_all_clients_say_how_often_each_takes_part(server: str) -> None:
    """30 rounds of 200: 6 participations each of 1,000 clients, 7 of 900, and 30 of 200."""
    for clients, often in ((1000, 6), (900, 7), (200, 30), (10_000, 1)):
        asked = {"participants": 200, "rounds": 30, "clients": clients}
        answer = get(server, "/api/plan", asked).json()
        assert answer["plan"]["plan"]["participations"] == often
        assert f"--clients {clients} " in answer["run_command"] + " "
        del asked["clients"]
        said = get(server, "/api/plan", asked | {"participations": often}).json()["plan"]
        assert said["tau2"] == answer["plan"]["tau2"]


def test_the_page_offers_every_dataset_with_a_model_that_fits(server: str) -> None:
    offered = re.findall(r'<option value="([a-z0-9-]+)" data-model="([a-z]+)">', get(server, "/").text)
    assert [name for name, _ in offered] == [spec.name for spec in CATALOG]
    assert all(accepts(model, sample_spec(spec_named(name))) for name, model in offered)
