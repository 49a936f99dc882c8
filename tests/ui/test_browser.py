"""The pages in a real browser: they work without errors, fit every width, and stand up to axe-core."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from niss.mechanism import gdp_epsilon
from report.conftest import add_ledger, write_attack
from report.test_charts import FOUND
from ui.browser import SCHEMES, WIDTHS, Tab, axe_findings, chromium, luminance, open_tab
from ui.conftest import cli_plan, play_round


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


def planned(tab: Tab, **asked: str) -> None:
    """Wait until the page shows the plan of its settings, with these among them."""
    # Longer than the page waits after a change before it asks.
    tab.page.wait_for_timeout(400)
    tab.page.wait_for_function(
        """(asked) => {
          const answer = document.getElementById("answer");
          const query = new URLSearchParams(answer.dataset.query);
          return !answer.hidden && !answer.classList.contains("stale")
            && answer.dataset.query === location.search.slice(1)
            && Object.entries(asked).every(([name, value]) => query.get(name) === value);
        }""",
        arg=asked,
        timeout=60_000,
    )


def shown(tab: Tab) -> dict[str, float]:
    """The numbers of the plan, by their names in JSON."""
    found = tab.page.eval_on_selector_all(
        "[data-key]", "all => all.map((one) => [one.dataset.key, Number(one.dataset.value)])"
    )
    return {key: value for key, value in found if isinstance(value, int | float) and not math.isnan(value)}


def slide(tab: Tab, name: str, place: int) -> None:
    tab.page.evaluate(
        "([id, place]) => { const range = document.getElementById(id); range.value = place;"
        " range.dispatchEvent(new Event('input', {bubbles: true})); }",
        [f"set-{name}-range", place],
    )
    planned(tab, **{name: tab.page.input_value(f"#set-{name}")})


def check_printed(tab: Tab, least: int, line: str) -> None:
    """What the page shows, `least` numbers and more, is what the command prints; its Python has this line."""
    printed = cli_plan(tab.page.inner_text("#command"))
    assert len(shown(tab)) >= least
    numbers = printed["plan"] | printed
    assert shown(tab) == {key: numbers[key] for key in shown(tab)}
    assert json.loads(tab.page.text_content("#json")) == printed
    assert line in tab.page.inner_text("#python")


def test_the_page_shows_what_the_command_prints(browser: Any, server: str) -> None:
    asked = "participants=40&rounds=20&collusion=0.1&dropout=0.05&epsilon=5"
    with open_tab(browser, f"{server}/?{asked}") as tab:
        planned(tab)
        check_printed(tab, 10, "participants=40")
        tab.check()


def test_every_slider_changes_the_numbers(browser: Any, server: str) -> None:
    with open_tab(browser, f"{server}/?participants=24&clients=24&rounds=10") as tab:
        planned(tab)
        tab.page.click("summary:has-text('More settings')")
        for name in ("neighbours", "kappa"):
            tab.page.uncheck(f"#set-{name}-auto")
            planned(tab, **{name: tab.page.input_value(f"#set-{name}")})
        for name in [
            "epsilon",
            "delta",
            "rounds",
            "participants",
            "clients",
            "neighbours",
            "kappa",
            "collusion",
            "dropout",
        ]:
            before = shown(tab)
            # Few neighbours would be too few for the colluders that follow.
            slide(tab, name, 900 if name == "neighbours" else 300)
            assert shown(tab) != before, name
            words = tab.page.inner_text("#command").split()
            assert float(words[words.index(f"--{name}") + 1]) == float(tab.page.input_value(f"#set-{name}"))
        tab.check()


def test_the_switch_carries_shares_and_draws_the_noise_over_the_rounds(browser: Any, server: str) -> None:
    with open_tab(browser, f"{server}/?participants=20&rounds=30") as tab:
        planned(tab)
        assert tab.page.is_hidden("#set-pattern")
        assert tab.page.inner_text("#noise-title") == "Noise in the sum"
        tab.page.get_by_role("switch", name="Carry shares to the next round").check()
        planned(tab, carry="true")
        assert tab.page.inner_text("#noise-title") == "Noise in the model"
        assert tab.page.is_visible("#set-pattern")
        tab.page.click("summary:has-text('More settings')")
        assert tab.page.is_hidden("#set-neighbours")
        slide(tab, "clients", 400)
        assert int(tab.page.input_value("#set-clients")) % 20 == 0
        check_printed(tab, 7, "carry=True")
        assert tab.page.locator("#chart svg:visible svg path").count() >= 4
        tab.page.focus("#chart")
        tab.page.keyboard.press("End")
        reading = tab.page.text_content("#chart [aria-live]")
        assert reading.startswith("Round 30, 1  trusted server, fresh noise, 0.")
        assert "carried shares, nobody trusted" in reading
        for name in ("rounds", "participants", "epsilon", "collusion", "dropout"):
            before = tab.page.text_content("#json")
            slide(tab, name, 300)
            assert tab.page.text_content("#json") != before, name
            size = int(tab.page.input_value("#set-participants"))
            assert int(tab.page.input_value("#set-clients")) % size == 0
        tab.page.uncheck("#set-carry")
        planned(tab)
        assert tab.page.inner_text("#noise-title") == "Noise in the sum"
        assert "--carry" not in tab.page.inner_text("#command")
        tab.check()


def test_records_are_asked_about_silos_and_begin_with_repairs(browser: Any, server: str) -> None:
    with open_tab(browser, f"{server}/?participants=24&rounds=10&epsilon=5") as tab:
        planned(tab, unit="client", clients="1000", mode="tolerate")
        tab.page.click("[data-unit=record]")
        tab.page.wait_for_selector("label:has-text('Records of all silos')")
        planned(tab, unit="record", epsilon="5", mode="repair", participants="10")
        assert tab.page.inner_text("[data-unit=record] b").startswith("Records")
        check_printed(tab, 10, "unit='record'")
        tab.page.fill("#set-participants", "20")
        tab.page.select_option("#set-mode", "tolerate")
        planned(tab, mode="tolerate", participants="20")
        tab.page.get_by_role("button", name="Reset").click()
        planned(tab, unit="record", epsilon="2", mode="repair", participants="10")
        tab.page.click("[data-unit=client]")
        tab.page.wait_for_selector("label:has-text('Clients in all')")
        planned(tab, unit="client", mode="tolerate", epsilon="2")
        tab.check()


def test_all_clients_are_enough_for_a_round(browser: Any, server: str) -> None:
    with open_tab(browser, f"{server}/?participants=24&rounds=10&clients=40") as tab:
        planned(tab, clients="40")
        assert "over 6 participations" in tab.page.inner_text("#numbers")
        tab.page.fill("#set-participants", "60")
        planned(tab, participants="60", clients="60")
        assert "over 10 participations" in tab.page.inner_text("#numbers")
        tab.check()


def test_a_fault_is_shown_with_its_hint_and_goes_away(browser: Any, server: str) -> None:
    with open_tab(browser, f"{server}/?participants=20&rounds=30&carry=true&clients=100") as tab:
        planned(tab)
        tab.page.fill("#set-rounds", "5000")
        tab.page.wait_for_selector("#fault-hint code:has-text('niss plan --carry')")
        assert "`" not in tab.page.inner_text("#fault")
        tab.page.fill("#set-rounds", "30")
        planned(tab, rounds="30")
        tab.page.fill("#set-clients", "110")
        tab.page.wait_for_selector("#fault:not([hidden])")
        assert "whole cohorts of 20" in tab.page.inner_text("#fault-message")
        assert "100 or 120" in tab.page.inner_text("#fault-hint")
        tab.page.select_option("#set-pattern", "any")
        planned(tab, pattern="any", clients="110")
        assert tab.page.is_hidden("#fault")
        tab.page.uncheck("#set-carry")
        planned(tab)
        tab.page.fill("#set-collusion", "0.97")
        tab.page.wait_for_selector("#fault:not([hidden])")
        assert "infeasible" in tab.page.inner_text("#fault-message")
        assert "lower it" in tab.page.inner_text("#fault-hint")
        # A field that is cleared is no fault.
        tab.page.fill("#set-collusion", "")
        tab.page.wait_for_selector("#fault", state="hidden")
        assert tab.page.inner_text("#status") == "Collusion: give a number to go on."
        tab.page.fill("#set-collusion", "0.1")
        planned(tab, collusion="0.1")
        assert tab.page.is_hidden("#fault")
        # The browser itself reports the refused requests; nothing else may have gone wrong.
        assert all("422" in error for error in tab.errors)


def test_moving_epsilon_changes_the_picture_and_whether_it_will_learn(browser: Any, server: str) -> None:
    with open_tab(
        browser, f"{server}/?participants=24&clients=24&rounds=10&epsilon=10&parameters=2000"
    ) as tab:
        planned(tab)
        seen = []
        for epsilon in ("10", "3", "0.1"):
            tab.page.fill("#set-epsilon", epsilon)
            planned(tab, epsilon=epsilon)
            dot = tab.page.locator("#outlook circle").bounding_box()["x"]
            noise = float(tab.page.get_attribute('[data-show="noise_norm"]', "data-value"))
            seen.append((dot, noise, tab.page.inner_text('[data-show="verdict"]')))
        assert [one[0] for one in seen] == sorted(one[0] for one in seen)
        assert seen[0][1] < seen[1][1] < seen[2][1]
        assert [one[2] for one in seen] == ["yes", "with losses", "hardly"]
        words = json.loads(tab.page.text_content("#json"))["outlook"]
        assert words["verdict"] == "hopeless"
        card = tab.page.inner_text(".card:has([data-show=verdict])").split()
        assert " ".join(card) == f"hardly {words['finding']}"
        assert tab.page.inner_text("#helps") == f"What helps: {words['helps'].replace('`', '')}."
        tab.check()


def test_the_page_shows_the_command_that_runs_the_plan(browser: Any, server: str) -> None:
    with open_tab(browser, f"{server}/?participants=12&rounds=4&epsilon=8") as tab:
        planned(tab)
        command = tab.page.inner_text("#run-command").split()
        assert command[:2] == ["niss", "run"]
        assert command[command.index("--epsilon") + 1] == "8"
        tab.page.select_option("#run-data", "shakespeare")
        other = tab.page.inner_text("#run-command").split()
        assert other == [*command, "--dataset", "shakespeare", "--model", "gru"]
        tab.check()


def test_the_live_page_shows_folder_settings_and_what_is_spent(browser: Any, server: str, runs: Path) -> None:
    add_ledger(runs / "going", clients=3, rounds=3)
    with open_tab(browser, f"{server}/live?run=going") as tab:
        tab.page.wait_for_selector("#settings dd")
        shown = tab.page.inner_text("#settings")
        assert str(runs / "going") in shown
        assert "mnist-mini" in shown
        assert tab.page.locator("#resume").count() == 0
        assert f"niss run --resume {runs / 'going'}" not in shown
        spent = tab.page.inner_text("#methods td:nth-of-type(3)")
        assert float(spent) == pytest.approx(gdp_epsilon(0.3 * 3**0.5, 1e-5), abs=0.011)
        assert float(spent) >= gdp_epsilon(0.3 * 3**0.5, 1e-5) - 1e-8
        assert "at most 3.00 was promised" in tab.page.inner_text("#spent-words")
        tab.check()


def test_the_list_leads_to_reports_of_runs_and_attacks(browser: Any, server: str, runs: Path) -> None:
    write_attack(runs / "attack", attack="carried", **FOUND["carried"])
    with open_tab(browser, f"{server}/runs") as tab:
        tab.page.click("text=done >> nth=0")
        tab.page.wait_for_selector("h2:has-text('Accuracy')")
        assert "/report?run=done" in tab.page.url
        tab.check()
    with open_tab(browser, f"{server}/runs") as tab:
        tab.page.click("#runs >> text=attack >> nth=0")
        tab.page.wait_for_selector("h1")
        assert "/report?run=attack" in tab.page.url
        band = tab.page.locator(".band:visible").last
        band.locator(".catch").hover(force=True)
        assert band.locator(".reading").is_visible()
        assert "server, rule off: 1.950" in band.locator(".reading").text_content()
        tab.check()


@pytest.mark.slow
def test_only_the_latest_answer_counts(browser: Any, server: str) -> None:
    with open_tab(browser, f"{server}/?participants=24") as tab:
        planned(tab)

        def hold_back(route: Any) -> None:
            if "epsilon=1&" in route.request.url:
                tab.page.wait_for_timeout(1200)
            route.continue_()

        tab.page.route("**/api/plan*", hold_back)
        tab.page.fill("#set-epsilon", "1")
        tab.page.wait_for_timeout(400)
        tab.page.fill("#set-epsilon", "9")
        tab.page.wait_for_timeout(3000)
        planned(tab, epsilon="9")
        assert shown(tab)["epsilon_joint"] == pytest.approx(9.0, rel=0.01)


def test_the_chart_is_read_with_the_keyboard_and_the_pointer(browser: Any, server: str) -> None:
    with open_tab(browser, f"{server}/?participants=24") as tab:
        planned(tab)
        tab.page.focus("#chart")
        tab.page.keyboard.press("End")
        said = tab.page.locator("#chart [aria-live]")
        assert said.text_content().startswith("κ 100, ")
        assert "NISS, all noise" in said.text_content()
        assert tab.page.locator("#chart .band:visible .reading").last.is_visible()
        tab.page.keyboard.press("ArrowLeft")
        assert said.text_content().startswith("κ ")
        assert not said.text_content().startswith("κ 100,")
        first = tab.page.locator("#chart .band:visible").first
        assert not first.locator(".reading").is_visible()
        first.locator(".catch").hover(force=True)
        assert first.locator(".reading").is_visible()
        assert first.locator(".reading").text_content().startswith("κ 0.")
        tab.check()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_pages_fit_and_are_accessible(browser: Any, server: str, width: int, scheme: str) -> None:
    pages = {
        "/?participants=24&dropout=0.05": "#answer:not([hidden])",
        "/?participants=20&rounds=30&carry=true&clients=100": "#answer:not([hidden])",
        "/?unit=record&rounds=4&batch=0.5": "#answer:not([hidden])",
        "/runs": "#runs li",
        "/live?run=going": "#methods td",
    }
    for page, ready in pages.items():
        with open_tab(browser, server + page, width=width, scheme=scheme) as tab:
            tab.page.wait_for_selector(ready, timeout=60_000)
            if page.startswith("/?"):
                planned(tab)
                tab.page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
            tab.check()
            assert (luminance(tab) > 200) == (scheme == "light")
            assert axe_findings(tab) == [], page


@pytest.mark.slow
def test_the_live_page_follows_a_run_to_its_end(browser: Any, server: str, runs: Path) -> None:
    with open_tab(browser, f"{server}/live?run=going") as tab:
        tab.page.wait_for_selector("text=training round 4 of 10")
        play_round(runs / "going", 4)
        tab.page.wait_for_selector("text=training round 5 of 10", timeout=10_000)
        result = {"label": "niss", "method": "niss", "accuracy": 0.5}
        (runs / "going" / "result.json").write_text(json.dumps(result), encoding="utf-8")
        tab.page.wait_for_selector("#state.finished", timeout=10_000)
        tab.check()
