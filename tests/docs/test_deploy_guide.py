"""The guide for several machines: typed word for word on machines with different names, and its Python on a tracker."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from docs.machines import Machines, machines, why_not
from docs.snippets import ROOT, Block, blocks
from niss.accounting import LedgerFile
from niss.protocol.keyfile import create_keyfile
from niss.protocol.keys import Identity
from support.protocol_round import seeded_entropy
from tracker.harness import tracker_process

GUIDE = ROOT / "docs" / "guides" / "deploy.md"
AUTHORITY, SERVER, TRACKER = "authority.example", "server.example", "tracker.example"
NODES = [f"node-{number}.example" for number in range(3)]
ROLES = {
    "on the authority": [AUTHORITY],
    "on the server": [SERVER],
    "on the tracker": [TRACKER],
    "on the server and the tracker": [SERVER, TRACKER],
    "on each node": NODES,
}
# What only one machine may have: keys in PEM or OpenSSH form, key files of niss, memories of clients.
_PRIVATE = re.compile(rb"PRIVATE KEY|^niss-keyfile/|\"memory\": ")
_MISMATCH = """
import json, ssl, urllib.error, urllib.request
trusted = ssl.create_default_context(cafile="niss/ca.crt")
for host in {hosts}:
    try:
        urllib.request.urlopen(f"https://{{host}}/healthz", context=trusted, timeout=20).read()
    except urllib.error.HTTPError:
        print(host, "answered")
    except urllib.error.URLError as error:
        print(host, type(error.reason).__name__)
    else:
        print(host, "answered")
"""


def place(block: Block) -> str:
    """Where the page says that a block is typed."""
    assert block.not_run is not None, block
    return block.not_run.partition(";")[0]


def steps() -> tuple[str, list[Block]]:
    """What is typed in every shell, and the blocks that follow, in the order of the page."""
    found = [block for block in blocks(GUIDE) if block.language == "bash"]
    (before,) = [block for block in found if place(block) == "in every shell"]
    return before.text, [block for block in found if place(block) in ROLES]


def test_every_block_says_where_it_is_typed():
    found = [block for block in blocks(GUIDE) if block.language in ("bash", "")]
    assert {place(block) for block in found} == {*ROLES, "in every shell", "on every machine"}
    prelude, rest = steps()
    for name in (AUTHORITY, SERVER, TRACKER, *NODES):
        assert name in prelude
    assert len(rest) == 11


def private_files(home: Path) -> dict[str, str]:
    """By digest of its content, each file of a machine that holds something private."""
    found = {}
    for path in home.rglob("*"):
        if path.is_file() and _PRIVATE.search(content := path.read_bytes()):
            found[hashlib.sha256(content).hexdigest()] = str(path.relative_to(home))
    return found


def check_secrets(federation: Machines) -> None:
    """Each secret is on one machine, and those of the authority and of TLS on no node."""
    owners: defaultdict[str, set[str]] = defaultdict(set)
    names = {}
    for name in federation.names:
        for digest, path in private_files(federation.folder(name)).items():
            owners[digest].add(name)
            names.setdefault(name, set()).add(path)
    assert [places for places in owners.values() if len(places) > 1] == []
    assert names[AUTHORITY] == {"niss/ca.key"}
    assert {"niss/tls.key", "niss/server.key"} <= names[SERVER]
    assert {"niss/tls.key", "niss/tracker.key"} <= names[TRACKER]
    for node in NODES:
        assert names[node] == {"niss/auth", "niss/state/identity.key", "niss/state/notes"}
        given = {path.name for path in (federation.folder(node) / "niss").iterdir()}
        assert {"ca.crt", "coalition.toml", "server.pub", "holder.pub"} <= given
        assert not given & {"ca.key", "tls.key", f"{SERVER}.crt", "server.key"}


@pytest.mark.slow
def test_the_guide_works_between_machines_with_different_names(tmp_path):
    if reason := why_not():
        pytest.skip(reason)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT / 'src'}",
        "OMP_NUM_THREADS": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PYTHONWARNINGS": "ignore",
    }
    prelude, rest = steps()
    with machines([AUTHORITY, SERVER, TRACKER, *NODES], tmp_path, environment) as federation:
        for block in rest:
            for name in ROLES[place(block)]:
                printed = federation.run(name, f"{prelude}\n{block.text}", timeout=1800)
            if "niss account" in block.text:
                assert "What binds is niss-epsilon" in printed or "Limit: niss-epsilon" in printed, printed
        answer = federation.run(SERVER, "flwr ls fed --format json")
        (run,) = json.loads(answer[answer.index("{") :])["runs"]
        assert run["status"] == "finished:completed", federation.logs()
        # The certificates are for the names, and for nothing else that leads to the same machine.
        hosts = [
            f"{TRACKER}:8440",
            f"{federation.address(TRACKER)}:8440",
            f"{federation.address(SERVER)}:8000",
        ]
        tried = federation.run(NODES[0], f"python3 - <<'END'\n{_MISMATCH.format(hosts=hosts)}\nEND")
        assert tried.splitlines() == [
            f"{hosts[0]} answered",
            f"{hosts[1]} SSLCertVerificationError",
            f"{hosts[2]} SSLCertVerificationError",
        ]
        check_secrets(federation)
        report = json.loads((federation.folder(SERVER) / "niss" / "report.json").read_text())
        assert [one["survivors"] for one in report["rounds"]] == [3, 3]
        assert "on trust" not in "\n".join(report["statement"]["caveats"])
        for node in NODES:
            ledger = LedgerFile.read(federation.folder(node) / "niss" / "state" / "ledger.jsonl")
            assert (
                sum(any(charge.mu2 > 0.0 for charge in entry.charges.values()) for entry in ledger.entries)
                == 2
            )


def test_the_python_of_the_tracker_runs(tmp_path, monkeypatch):
    """Against a real tracker, on a port of its own."""
    (block,) = [one for one in blocks(GUIDE) if one.language == "python" and "TrackerClient" in one.text]
    server = Identity.generate(seeded_entropy("the server of the guide"))
    create_keyfile(tmp_path / "server.key", server)
    monkeypatch.chdir(tmp_path)
    Path("tracker").mkdir()
    printed = io.StringIO()
    with tracker_process(tmp_path / "tracker", server.public) as process, contextlib.redirect_stdout(printed):
        # The page has the default port; here a free one.
        text = block.text.replace("http://127.0.0.1:8440", process.url)
        assert text != block.text
        exec(compile(text, str(block), "exec"), {})  # noqa: S102  (the documentation's own code)
    lines = printed.getvalue().splitlines()
    assert lines[0] == "16 keys in stock, 0 more wanted"
    assert lines[-1].startswith("4 seated, link 1 for the anchor ")
