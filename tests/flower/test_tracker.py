"""Keys and beacon from a real tracker process."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from flwr.app import Message
from flwr.serverapp.strategy import FedAvg

from flower.grid import FakeGrid, global_model, perhaps_without_a_round, with_body
from niss.accounting import Plan
from niss.errors import PausedError
from niss.flower import NissStrategy
from niss.flower.mod import open_store
from niss.local.deployment import free_port
from niss.protocol.keyfile import create_keyfile
from niss.protocol.keys import Identity
from niss.session.proposal import read_proposal
from niss.session.server import Session
from niss.tracker.client import TrackerClient
from tracker.harness import TrackerProcess

pytestmark = pytest.mark.skipif(
    find_spec("fastapi") is None or find_spec("uvicorn") is None,
    reason="the tracker is not installed: pip install 'niss[tracker]'",
)
PLAN = Plan(clip=0.5, epsilon=8.0, participations=4, neighbours=3, kappa=2.0, collusion=0.1)


class Service(TrackerProcess):
    """A tracker in a process of its own, which can be killed and started again, and its server's key."""

    def __init__(self, folder: Path) -> None:
        key = create_keyfile(folder / "server.key", Identity.generate(os.urandom))
        super().__init__(folder, key.public)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    def grid(self, nodes: int = 6, **config) -> FakeGrid:
        """Nodes that pin its address and its holder."""
        return FakeGrid(nodes, **{"niss-tracker": self.url, "niss-holder": self.ready["holder"], **config})

    def strategy(self, plan: Plan = PLAN, **options) -> NissStrategy:
        inner = FedAvg(fraction_evaluate=0.0)
        return NissStrategy(inner, plan=plan, tracker=self.url, key=self.folder / "server.key", **options)


@pytest.fixture(scope="module")
def one_service(tmp_path_factory):
    service = Service(tmp_path_factory.mktemp("tracker"))
    yield service
    if service.running:
        service.kill()


@pytest.fixture
def service(one_service):
    """One process for all tests of a file, started again where a test has left it dead."""
    if not one_service.running:
        one_service.start()
    return one_service


def run(strategy: NissStrategy, grid: FakeGrid, rounds: int = 1) -> None:
    with perhaps_without_a_round():
        strategy.start(grid, global_model(), num_rounds=rounds, timeout=1)


def test_a_run_with_a_tracker_that_is_restarted_between_rounds(service):
    grid = service.grid()
    strategy = service.strategy()

    def restart(_message: Message) -> None:
        if len(strategy.rounds) == 1:
            service.restart(signal.SIGKILL)

    grid.on_request("round", restart, node=list(grid.contexts)[-1])
    run(strategy, grid, 3)
    assert [one.survivors for one in strategy.rounds] == [6, 6, 6]
    caveats = "\n".join(strategy.statement.caveats)
    assert "The server holds the beacon itself" not in caveats
    assert "beacon holder's key" not in caveats


def test_who_joins_pays_for_every_graph_of_the_chain(service):
    """Each attempt at each round is another graph, and each may turn out well for colluders."""
    grid = service.grid()
    strategy = service.strategy(replace(PLAN, attempts=4))
    run(strategy, grid, 3)
    failure = strategy.plan.failure
    assert failure > 0.0
    for context in grid.contexts.values():
        with open_store(context, None) as store:
            assert store.state.failures == pytest.approx(4 * 3 * failure)


def test_a_server_that_is_killed_goes_on_with_the_same_tracker(service, tmp_path):
    grid = service.grid()
    with grid.killing(2):
        run(service.strategy(resume=tmp_path / "run"), grid, 3)
    again = service.strategy(resume=tmp_path / "run")
    run(again, grid, 3)
    assert [one.survivors for one in again.rounds] == [6, 0, 6]
    assert "the server ended" in again.rounds[1].skipped


def test_a_round_that_was_seated_and_told_to_nobody_is_skipped_and_not_charged(
    service, tmp_path, monkeypatch
):
    """The tracker lets nobody sit down twice: a killed server may not look at graphs until it likes one."""
    grid = service.grid()
    opened = Session._open

    def killed_once_open(session: Session, number, *rest):
        found = opened(session, number, *rest)
        if number == 1:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(Session, "_open", killed_once_open)
    with pytest.raises(KeyboardInterrupt):
        run(service.strategy(resume=tmp_path / "run"), grid, 3)
    monkeypatch.undo()
    grid.dead.add(next(iter(grid.contexts)))
    again = service.strategy(resume=tmp_path / "run")
    run(again, grid, 3)
    assert [one.survivors for one in again.rounds] == [6, 0, 5]
    assert "the tracker refused" in again.rounds[1].skipped
    assert len(again.session.books.charges) == 2


class TestATrackerThatIsAway:
    """Rounds wait for it; none is used up, and nobody pays."""

    @pytest.fixture(autouse=True)
    def impatient(self, monkeypatch):
        from niss.tracker import client, coordinator

        monkeypatch.setattr(client, "_LONGEST_PAUSE", 0.01)
        monkeypatch.setattr(coordinator, "_PAUSE", 0.05)

    def killed_in(self, service, grid: FakeGrid, stage: str) -> None:
        if stage == "start":
            service.kill()
            return

        def kill(_message: Message) -> None:
            if service.running:
                service.kill()
                grid.tamper = lambda message: message

        grid.on_request(stage, kill, node=None)

    @pytest.mark.parametrize("stage", ["enrol", "round"])
    def test_for_too_long_pauses_the_run_which_then_goes_on(self, service, tmp_path, stage):
        grid, options = service.grid().keep_state(tmp_path / "nodes"), {"resume": tmp_path / "run"}
        report = tmp_path / "report.json"
        first = service.strategy(patience=0.3, report=report, **options)
        self.killed_in(service, grid, stage)
        with pytest.raises(PausedError, match=r"could not begin for 0\.3 seconds") as e:
            first.start(grid, global_model(), num_rounds=3, timeout=1)
        assert "start again with the same settings" in e.value.hint
        assert "nobody has paid" in e.value.hint
        assert "does not answer" in e.value.message or "could not use the tracker" in e.value.message
        assert json.loads(report.read_text())["paused"] == e.value.message
        played = 0 if stage == "enrol" else 1
        assert [one.survivors for one in first.rounds] == [6] * played, "the uploads that were sent stand"
        service.start()
        again = service.strategy(report=report, **options)
        run(again, grid, 3)
        assert [one.survivors for one in again.rounds] == [6, 6, 6]
        assert json.loads(report.read_text())["paused"] == ""
        assert all(grid.ledger(node).participations("self") == 3 for node in grid.contexts)

    @pytest.mark.parametrize("resumed", [False, True])
    def test_when_a_run_is_started_pauses_it_before_anyone_is_asked(self, service, tmp_path, resumed):
        grid, options = service.grid(), {"resume": tmp_path / "run", "patience": 0.3}
        if resumed:
            self.killed_in(service, grid, "round")
            with pytest.raises(PausedError):
                service.strategy(**options).start(grid, global_model(), num_rounds=3, timeout=1)
        else:
            service.kill()
        asked = len(grid.sent)
        with pytest.raises(
            PausedError, match=r"^the run could not begin for 0\.3 seconds: .*does not answer"
        ) as e:
            service.strategy(**options).start(grid, global_model(), num_rounds=3, timeout=1)
        assert "start again with the same settings" in e.value.hint
        assert len(grid.sent) == asked
        service.start()
        again = service.strategy(**options)
        run(again, grid, 3)
        assert [one.survivors for one in again.rounds] == [6, 6, 6]

    @pytest.mark.parametrize(("stage", "what"), [("start", "the run"), ("enrol", "round 1")])
    def test_for_a_while_costs_no_round(self, service, monkeypatch, caplog, stage, what):
        from niss.tracker import coordinator

        grid, server = service.grid(), service.strategy(patience=60.0)
        self.killed_in(service, grid, stage)
        waited = []

        def come_back(seconds: float) -> None:
            waited.append(seconds)
            if not service.running:
                service.start()

        clock = SimpleNamespace(monotonic=time.monotonic, sleep=come_back)
        monkeypatch.setattr(coordinator, "time", clock)
        run(server, grid, 2)
        assert waited
        assert f"niss: {what} waits, for at most" in caplog.text
        assert [one.survivors for one in server.rounds] == [6, 6]
        assert not server.session.members.left_out


def test_a_server_that_lies_about_the_trackers_chain_is_caught(service):
    grid, strategy = service.grid(), service.strategy()

    def lie(body: bytes) -> bytes:
        return replace(read_proposal(body), anchor=bytes(32)).signed(strategy._kept.identity)

    grid.on_request("enrol", with_body(lie), node=None)
    run(strategy, grid)
    assert strategy.rounds[0].skipped
    assert set(strategy.session.members.left_out.values()) == {"declined: the tracker cannot be used"}


def test_what_is_wrong_with_a_tracker_is_not_told_to_the_server(service, monkeypatch):
    """Whatever is there, or is not: one reason. Before, it told a closed port from a web server from a tracker."""
    from niss.tracker import client

    monkeypatch.setattr(client, "_LONGEST_PAUSE", 0.0)
    reasons = set()
    for address in (
        f"http://127.0.0.1:{free_port()}",
        service.url + "/somewhere",
        service.url.replace("http", "https"),
        "ftp://127.0.0.1",
        "http://127.0.0.1:999999",
        "http://[::1",
        "nonsense",
        service.url,  # There is a tracker, but it does not know the run.
    ):
        grid, strategy = FakeGrid(2, **{"niss-tracker": address}), service.strategy()

        def lie(message: Message, address: str = address, strategy: NissStrategy = strategy) -> Message:
            record = message.content["niss"]
            run = os.urandom(16)
            proposal = replace(read_proposal(record["body"]), tracker=address, run=run)
            record["body"], record["run"] = proposal.signed(strategy._kept.identity), run
            return message

        grid.tamper = lie
        run(strategy, grid)
        assert len(strategy.session.members.left_out) == 2
        reasons |= set(strategy.session.members.left_out.values())
    assert reasons == {"declined: the tracker cannot be used"}


def test_a_pinned_tracker_is_the_only_one_that_is_spoken_to(service, monkeypatch):
    asked = []
    connect = TrackerClient.__init__

    def count(self, url, *args, **named) -> None:
        asked.append(url)
        connect(self, url, *args, **named)

    strategy = service.strategy()
    monkeypatch.setattr(TrackerClient, "__init__", count)
    grid = FakeGrid(4, **{"niss-tracker": "https://tracker.example:8443"})
    for node in list(grid.contexts)[:3]:
        grid.contexts[node].node_config["niss-tracker"] = service.url + "/"
    run(strategy, grid)
    assert strategy.rounds[0].survivors == 3
    assert set(asked) == {service.url}
    (why,) = strategy.session.members.left_out.values()
    assert why == "declined: the tracker of this run is not the one this node expects"


def test_runs_with_a_pinned_holder_are_paid_for_and_then_refused(service, tmp_path):
    """A plan pays for four chains; with the fifth a server would have seen more graphs than delta allows for."""
    plan = replace(PLAN, participations=8)
    grid = service.grid().keep_state(tmp_path / "nodes")
    survivors = []
    for _ in range(5):
        strategy = service.strategy(plan)
        run(strategy, grid, 2)
        survivors += [one.survivors for one in strategy.rounds]
    assert survivors == [6] * 8 + [0, 0]
    why = "declined: this client's own limits or its ledger do not allow it"
    assert set(strategy.session.members.left_out.values()) == {why}
    for node in grid.contexts:
        notes = json.loads((grid.home(node) / "notes").read_bytes())
        assert notes["failing"] == 4
        assert notes["failures"] == pytest.approx(0.1 * plan.delta)
