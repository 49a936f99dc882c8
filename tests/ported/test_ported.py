"""Flower's published apps, ported: what each needed, that nothing else changed, and that it runs.

The apps in `apps` are written anew in the shape of Flower's own examples, on small data: the same files, strategies,
mods and messages. Beside each is its port, as a patch. `docs/guides/porting.md` says what to do; its snippets are put
into the app of digits and run.
"""

from __future__ import annotations

import importlib
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.serverapp.strategy import Result
from torch import nn

from docs.snippets import ROOT, blocks
from flower.grid import FakeGrid
from niss.errors import ProtocolError
from niss.flower import NissStrategy
from niss.local.deployment import NAME, Deployment, Settings

HERE = Path(__file__).parent / "apps"
PAGE = ROOT / "docs" / "guides" / "porting.md"
DIGITS = "quickstart_pytorch"
PORTED = ("quickstart_numpy", "quickstart_sklearn", DIGITS, "custom_mods", "advanced_pytorch", "kaplan_meier")
TRAINED = PORTED[:-1]
PLAN, WITHOUT_NOISE = "Plan(clip=2.0, epsilon=8.0)", "Plan(tau2=0.0, clip=20.0, neighbours=3)"
RUN_CONFIG = {
    "num-server-rounds": 2,
    "local-epochs": 1,
    "learning-rate": 0.1,
    "fraction-train": 0.25,
    "fraction-evaluate": 0.5,
    "min-num-clients": 2,
}
# Rounds of four: one of these apps has a quarter of the nodes take part.
NODES = dict.fromkeys(PORTED, 4) | {"advanced_pytorch": 16}
MOD, STRATEGY = "app = ClientApp(mods=[niss_mod])\n", f"strategy = NissStrategy(FedAvg(), plan={PLAN})\n"
IMPORTS = """
from flwr.serverapp.strategy import FedAvgM
from niss import Plan
from niss.flower import NissMod, NissStrategy, niss_mod
from niss.records import Records

"""


@dataclass
class Ran:
    """An app that ran: the folder it left its files in, its grid, the strategies that it wrapped, and what came out."""

    folder: Path
    grid: FakeGrid
    strategies: list[NissStrategy] = field(default_factory=list)
    result: Result = field(default_factory=Result)

    @property
    def strategy(self) -> NissStrategy:
        (only,) = self.strategies
        return only

    @property
    def model(self) -> list[np.ndarray]:
        """The arrays of the model that the app saved in the end."""
        if (saved := self.folder / "final_model.pt").exists():
            return [one.numpy() for one in torch.load(saved).values()]
        with np.load(self.folder / "final_model.npz") as arrays:
            return [arrays[name] for name in arrays.files]


class Apps:
    """The apps in a folder of their own, to be changed and run."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._patch, self._runs = folder, monkeypatch, 0
        shutil.copytree(HERE, folder / "apps", ignore=shutil.ignore_patterns("__pycache__"))
        monkeypatch.syspath_prepend(str(folder / "apps"))
        monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def port(self, name: str) -> None:
        """Apply the patch of an app, and that of the app whose server it has."""
        for one in {name, server_of(name)}:
            command = ["git", "apply", "-p1", str(HERE / f"{one}.patch")]
            subprocess.run(command, cwd=self.folder / "apps", check=True)

    def change(self, file: str, before: str, after: str) -> None:
        path = self.folder / "apps" / file
        text = path.read_text()
        assert text.count(before) == 1
        path.write_text(text.replace(before, after))

    def run(self, name: str, nodes: int = 4, **settings: Any) -> Ran:
        """Run it as it now is, with so many nodes; random samples of nodes are the same each time."""
        for module in [one for one in sys.modules if one.partition(".")[0] in PORTED]:
            del sys.modules[module]
        importlib.invalidate_caches()
        self._runs += 1
        ran = Ran(self.folder / str(self._runs), FakeGrid(nodes))
        ran.folder.mkdir()
        settings = RUN_CONFIG | settings
        for number, context in enumerate(ran.grid.contexts.values()):
            context.node_config |= {"partition-id": number, "num-partitions": nodes}
            context.run_config = settings
        begin = NissStrategy.start

        def start(strategy: NissStrategy, *args: Any, **named: Any) -> Any:
            ran.strategies.append(strategy)
            ran.result = begin(strategy, *args, **named)
            return ran.result

        with self._patch.context() as patch:
            patch.chdir(ran.folder)
            patch.setattr(NissStrategy, "start", start)
            random.seed(1)
            ran.grid.app = importlib.import_module(f"{name}.client_app").app
            server = importlib.import_module(f"{server_of(name)}.server_app").app
            server(ran.grid, Context(1, 0, {}, RecordDict(), settings))
        return ran


def server_of(name: str) -> str:
    """The app whose server an app has."""
    return DIGITS if name == "custom_mods" else name


@pytest.fixture
def apps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Apps:
    return Apps(tmp_path, monkeypatch)


def changed_lines(name: str) -> int:
    """Lines that a port adds to the files of an app and to its server's, other than imports and empty ones."""
    count, counts = 0, False
    for line in "".join((HERE / f"{one}.patch").read_text() for one in {name, server_of(name)}).splitlines():
        if line.startswith("+++ b/"):
            counts = line.startswith((f"+++ b/{name}/", f"+++ b/{server_of(name)}/server_app.py"))
        elif line.startswith("+"):
            count += counts and bool(line[1:].strip()) and not line[1:].startswith(("from ", "import "))
    return count


@pytest.mark.parametrize("name", PORTED)
def test_a_port_is_two_lines_or_the_page_says_what_else(name: str) -> None:
    """The second line stands around the strategy that is there, or after it."""
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{name}`"))
    _, lines, else_ = (cell.strip() for cell in row.strip("| ").split("|"))
    count = changed_lines(name)
    assert lines == str(count)
    assert (else_ == "–") == (count == 2)


@pytest.mark.parametrize("name", TRAINED)
def test_without_noise_a_port_ends_where_the_original_ended(apps: Apps, name: str) -> None:
    before = apps.run(name, NODES[name])
    apps.port(name)
    apps.change(f"{server_of(name)}/server_app.py", PLAN, WITHOUT_NOISE)
    after = apps.run(name, NODES[name])
    assert [one.survivors for one in after.strategy.rounds] == [4] * 2
    for one, other in zip(before.model, after.model, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", PORTED)
def test_a_port_runs_under_noise_and_keeps_its_promise(apps: Apps, name: str) -> None:
    apps.port(name)
    ran = apps.run(name, NODES[name])
    assert all(record.survivors == record.participants == 4 for record in ran.strategy.rounds)
    spent = ran.strategy.privacy_spent()
    assert spent is not None
    assert 0.0 < spent.epsilon <= 8.0


OTHER_MODES = (
    'NissStrategy(FedAvg(), plan=Plan(clip=2.0, epsilon=8.0, mode="repair", dropout=0.2))',
    'NissStrategy(FedAvg(), plan=Plan(clip=2.0, epsilon=8.0, separation=2, mode="repair"), carry=True)',
    "NissStrategy(FedAvg(), plan=Plan(clip=2.0, epsilon=8.0), quantile=0.5, deadline=300.0)",
    "NissStrategy(FedAvg(min_available_nodes=6, min_train_nodes=6), plan=Plan(clip=2.0, epsilon=8.0))",
)


def snippets() -> Iterator[tuple[str, str]]:
    """The lines that the page gives for a client and for a server, empty where it gives none; then other modes."""
    for block in blocks(PAGE):
        if block.language == "python" and block.not_run:
            client, _, server = block.text.partition("# server_app.py\n")
            yield client.removeprefix("# client_app.py\n"), server
    yield from (("", f"strategy = {made}\n") for made in OTHER_MODES)


@pytest.mark.parametrize(("client", "server"), list(snippets()))
def test_the_app_of_digits_in_every_mode_and_as_the_page_says(apps: Apps, client: str, server: str) -> None:
    given = "from custom_mods.mods import get_log_mod\n\nmy_mod = get_log_mod('logs')\n"
    begins = 'strategy = FedAvg(fraction_evaluate=float(context.run_config["fraction-evaluate"]))'
    apps.change(f"{DIGITS}/client_app.py", "app = ClientApp()", IMPORTS + given + (client or MOD))
    apps.change(f"{DIGITS}/server_app.py", "app = ServerApp()", IMPORTS + "app = ServerApp()")
    apps.change(f"{DIGITS}/server_app.py", begins, (server or STRATEGY).strip().replace("\n", "\n    "))
    ran = apps.run(DIGITS, 6)
    rounds = ran.strategy.rounds
    assert all(record.survivors == record.participants for record in rounds)
    assert [record.participants for record in rounds] == ([3] * 2 if "carry" in server else [6] * 2)
    assert (ran.strategy.statement.unit == "record") == ("record" in server)
    spent = ran.strategy.privacy_spent()
    assert spent is not None
    assert 0.0 < spent.epsilon <= 8.0
    seen = ran.result.train_metrics_clientapp[2].keys()
    assert ("train_loss" in seen) == ("train_loss" in server)
    assert not ran.result.evaluate_metrics_clientapp
    assert set(ran.result.evaluate_metrics_serverapp) == {0, 1, 2}
    assert (ran.folder / "logs").exists() == ("my_mod" in client)


def test_batch_normalisation_is_left_out_of_the_network(apps: Apps) -> None:
    """With it, noise makes of a variance what is none; without, nothing that is sent was not trained."""
    apps.port(DIGITS)
    layer = "self.conv1 = nn.Conv2d(1, 6, 3)"
    apps.change(
        f"{DIGITS}/task.py", layer, "self.conv1 = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6))"
    )
    assert min(one.min() for one in apps.run(DIGITS, 4).model if one.shape == (6,)) < 0.0
    names: dict[str, Any] = {}
    (snippet,) = (one.text for one in blocks(PAGE) if one.language == "python" and "GroupNorm" in one.text)
    exec(snippet, names)  # noqa: S102  (the documentation's own code)
    mended = names["without_batch_norm"](nn.Sequential(nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6))))
    assert not list(mended.buffers())
    assert isinstance(mended[0][1], nn.GroupNorm)


class TestCustomMods:
    """Mods after NISS see app and update; those before it see noise alone, and messages of NISS."""

    def test_one_after_it_logs_as_before_and_evaluation_is_refused(self, apps: Apps) -> None:
        before = apps.run("custom_mods")
        apps.port("custom_mods")
        after = apps.run("custom_mods")
        for ran, kinds in ((before, {"train", "evaluate"}), (after, {"train"})):
            lines = [path.read_text().splitlines() for path in (ran.folder / ".runs_history").iterdir()]
            entries = [json.loads(line) for node in lines for line in node]
            assert {entry["kind"] for entry in entries} == kinds
            assert sum(entry["kind"] == "train" for entry in entries) == 8
            assert all(entry["num-examples"] > 0 for entry in entries)

    def test_one_before_it_sees_no_update_and_must_not_rely_on_a_config(self, apps: Apps) -> None:
        apps.port("custom_mods")
        apps.change("custom_mods/client_app.py", "[niss_mod, get_log_mod", "[get_log_mod")
        apps.change("custom_mods/client_app.py", '(".runs_history")]', '(".runs_history"), niss_mod]')
        with pytest.raises(ProtocolError, match="KeyError"):
            apps.run("custom_mods")
        apps.change("custom_mods/mods.py", 'message.content["config"]["server-round"]', "0")
        apps.change("custom_mods/mods.py", 'dict(reply.content["metrics"])', '{"sent": list(reply.content)}')
        ran = apps.run("custom_mods")
        lines = [path.read_text().splitlines() for path in (ran.folder / ".runs_history").iterdir()]
        sent = {name for node in lines for line in node for name in json.loads(line)["sent"]}
        assert sent.isdisjoint({"arrays", "metrics"})

    def test_one_that_fails_is_part_of_the_app(self, apps: Apps) -> None:
        apps.port("custom_mods")
        apps.change(
            "custom_mods/mods.py", "reply = call_next(message, context)", "raise IndexError('42 patients')"
        )
        apps.change(f"{DIGITS}/server_app.py", PLAN, WITHOUT_NOISE)
        ran = apps.run("custom_mods")
        assert [one.survivors for one in ran.strategy.rounds] == [4] * 2
        torch.manual_seed(1)
        first = importlib.import_module(f"{DIGITS}.task").Net().state_dict().values()
        for one, other in zip(first, ran.model, strict=True):
            np.testing.assert_allclose(one.numpy(), other, rtol=0, atol=1e-6)


def test_a_strategy_with_a_start_of_its_own_keeps_its_best_model_and_a_layer_stays_with_the_clients(
    apps: Apps,
) -> None:
    apps.port("advanced_pytorch")
    ran = apps.run("advanced_pytorch", NODES["advanced_pytorch"])
    kept = [json.loads(line) for line in (ran.folder / "outputs" / "results.jsonl").read_text().splitlines()]
    assert [entry["round"] for entry in kept] == [1, 2]
    assert (ran.folder / "outputs" / "best_1.pth").exists()
    taken = [context for context in ran.grid.contexts.values() if "classification-head" in context.state]
    assert 4 <= len(taken) <= 8


class TestQueries:
    def test_two_lines_alone_refuse_to_answer(self, apps: Apps) -> None:
        apps.change("kaplan_meier/client_app.py", "app = ClientApp()", IMPORTS + MOD)
        with pytest.raises(ValueError, match="need at least one array"):
            apps.run("kaplan_meier")

    def test_a_sum_of_counts_gives_the_same_curve(self, apps: Apps) -> None:
        """With 40 hospitals of 80 patients, each hidden whole: off by 0.1 in 1 of 10^9 runs or fewer."""
        exact = np.load(apps.run("kaplan_meier", 40).folder / "survival.npy")
        apps.port("kaplan_meier")
        ran = apps.run("kaplan_meier", 40)
        assert exact[0] == 1.0 > exact[-1] > 0.05
        np.testing.assert_allclose(np.load(ran.folder / "survival.npy"), exact, atol=0.15)
        sent = {name for message in ran.grid.received for name in message.content}
        assert "survival-data" not in sent


PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "ported"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.hatch.build.targets.wheel]
packages = ["."]
[tool.flwr.app]
publisher = "niss"
[tool.flwr.app.components]
serverapp = "{server}.server_app:app"
clientapp = "{client}.client_app:app"
[tool.flwr.app.config]
server-key = ""
report = ""
min-nodes = 0
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Flower's simulation engine is not installed")
@pytest.mark.parametrize("name", ["custom_mods", "advanced_pytorch"])
def test_flwr_run_runs_a_ported_app(apps: Apps, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    apps.port(name)
    monkeypatch.chdir(apps.folder)  # Apps leave their files where the SuperLink runs.
    folder = apps.folder / "apps"
    settings = "\n".join(f"{key} = {value}" for key, value in RUN_CONFIG.items())
    project = PROJECT.format(server=server_of(name), client=name) + settings
    (folder / "pyproject.toml").write_text(project)
    nodes = Settings(nodes=NODES[name], tls=False, tracker=False, pinned=False, simulated=True)
    with Deployment(apps.folder / "up", nodes) as federation:
        run, end = federation.submit(folder, {}), time.monotonic() + 500.0
        while not federation.status(run).startswith("finished"):
            assert time.monotonic() < end, "the run did not end in time"
            time.sleep(2.0)
        log = federation.flwr(["flwr", "log", run, NAME, "--show"])
        assert federation.status(run) == "finished:completed", log
    assert log.count("4 of 4 uploads summed") == 2
    assert "-differential privacy for every client" in log
