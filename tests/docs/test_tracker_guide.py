"""The tracker guide's Python runs against a real tracker, on a port of its own."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from docs.snippets import ROOT, blocks
from niss.protocol.keyfile import create_keyfile
from niss.protocol.keys import Identity
from support.protocol_round import seeded_entropy
from tracker.harness import tracker_process


def test_the_snippet_runs(tmp_path, monkeypatch):
    (block,) = [one for one in blocks(ROOT / "docs" / "guides" / "tracker.md") if one.language == "python"]
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
