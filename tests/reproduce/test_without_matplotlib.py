"""Experiments run, and their results are kept, where matplotlib is missing."""

from __future__ import annotations

import subprocess
import sys

RUN = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

sys.meta_path.insert(0, Missing())
from niss.cli.experiments import reproduce_app as app
app(sys.argv[1:])
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUN, *arguments], capture_output=True, text=True, timeout=300, check=False
    )


def test_a_sweep_and_a_merge(tmp_path):
    small = ["--set=data.clients=6", "--set=data.samples_per_client=20", "--set=training.participants=4"]
    small += ["--set=training.epochs=1", "--set=model.hidden=[4]", "--set=training.workers=1"]
    out = tmp_path / "out"
    ran = run(
        "sweep",
        "--panel=mnist-mini-mlp-iid",
        "--rounds=1",
        "--sigmas=0.01",
        "--device=cpu",
        *small,
        f"--out={out}",
        f"--work={tmp_path / 'work'}",
    )
    assert ran.returncode == 0, ran.stderr
    assert (out / "sweep" / "mnist-mini-mlp-iid.json").exists()
    assert "matplotlib is missing" in ran.stderr
    merged = run("merge", str(out), f"--out={tmp_path / 'merged'}")
    assert merged.returncode == 0, merged.stderr
    assert (tmp_path / "merged" / "tables.md").exists()
