"""Every Python and bash block of the documentation runs, and prints what the page says it prints."""

from __future__ import annotations

from typing import Any

import pytest

from docs.running import run_page
from docs.snippets import ROOT, RUNNABLE, blocks, pages

PAGES = [page for page in pages() if any(block.runs for block in blocks(page))]
QUICK = [page for page in PAGES if any(block.runs and not block.slow for block in blocks(page))]
SLOW = [page for page in PAGES if any(block.runs and block.slow for block in blocks(page))]


def own_model_and_data() -> dict[str, Any]:
    """A small module, twenty clients of eight samples each, and a test set."""
    import torch

    torch.manual_seed(1)

    def samples(count: int) -> tuple[Any, Any]:
        inputs = torch.randn(count, 6)
        return inputs, (inputs.sum(dim=1) > 0).long()

    return {
        "my_module": torch.nn.Sequential(torch.nn.Linear(6, 2)),
        "my_clients": [samples(8) for _ in range(20)],
        "my_test": samples(50),
    }


# What stands for the reader's own things in a page: `my_module`, `my_clients`.
PLACEHOLDERS = {"README.md": own_model_and_data}


def _name(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", QUICK, ids=_name)
def test_quick_blocks_run(page, tmp_path):
    assert run_page(page, tmp_path, PLACEHOLDERS.get(_name(page), dict)(), slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW, ids=_name)
def test_all_blocks_run(page, tmp_path):
    assert run_page(page, tmp_path, PLACEHOLDERS.get(_name(page), dict)(), slow=True)


@pytest.mark.parametrize("page", pages(), ids=_name)
def test_marks_are_known_and_say_why(page):
    """A mistyped mark would leave a block unrun, or run, without anyone noticing."""
    for block in blocks(page):
        for mark in block.marks:
            kind = mark.partition(":")[0]
            if kind in ("result", "table", "end"):
                continue
            assert kind in ("not run", "slow", "output"), f"{block}: unknown mark {mark!r}"
        assert block.not_run is None or len(block.not_run) > 5, f"{block}: say why it is not run"
        assert not block.slow or block.language in RUNNABLE, f"{block}: only what is run can be slow"


def test_the_tutorial_runs_whole():
    """Nothing of the tutorial is left out: a newcomer types every line of it."""
    tutorial = blocks(ROOT / "docs" / "tutorial.md")
    assert [str(block) for block in tutorial if block.language != "text" and not block.runs] == []
    assert sum(block.runs for block in tutorial) >= 6


def test_blocks_are_found():
    counted = {_name(page): sum(block.runs for block in blocks(page)) for page in PAGES}
    assert sum(counted.values()) >= 25, counted
