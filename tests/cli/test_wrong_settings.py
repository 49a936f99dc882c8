"""What is wrong is said at once, in full, and before anything heavy is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.terminals import run_python
from niss.cli.plan import plan_command
from niss.cli.simulate import compare_command, run_command
from niss.errors import ConfigError

_WITHOUT_TORCH = """
import sys
from niss.cli import main
sys.argv = ["niss", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    print("code", end.code, "torch" in sys.modules, "matplotlib" in sys.modules)
"""


@pytest.mark.parametrize(
    "line",
    [
        *("run --rounds 0", "run --set privacy.epsiln=3", "compare --methods fedavg,nis", "run absent.toml"),
        *("run --participants 20 --neighbours 500", "plan --participants 0"),
        *("report absent", "account absent"),
    ],
)
def test_what_cannot_be_used_is_refused_before_torch_is_loaded(line: str, tmp_path: Path) -> None:
    done = run_python(_WITHOUT_TORCH, *line.split(), cwd=tmp_path)
    assert "error:" in done.stderr
    assert done.stdout.split() == ["code", done.stdout.split()[1], "False", "False"], done.stderr
    assert done.stdout.split()[1] in ("2", "5")


def test_every_wrong_setting_is_named() -> None:
    with pytest.raises(ConfigError) as raised:
        run_command(rounds=0, clients=-5, epsilon=-1.0, settings=["training.epoch=3"])
    for name in ("rounds", "data.clients", "privacy.epsilon", "training.epoch", "did you mean 'epochs'?"):
        assert name in raised.value.message
    assert raised.value.field == "rounds"
    with pytest.raises(ConfigError) as raised:
        plan_command(participants=1, epsilon=-1.0, dropout=2.0, delta=7.0)
    for name in ("participants", "epsilon", "dropout", "delta"):
        assert name in raised.value.message


def test_more_shares_than_others_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only 199 others"):
        plan_command(participants=200, neighbours=500)
    for command, given in ((run_command, {"neighbours": 500}), (compare_command, {"settings": []})):
        config = tmp_path / "many.toml"
        config.write_text("[training]\nparticipants = 20\n[[methods]]\nneighbours = 500\n", encoding="utf-8")
        with pytest.raises(ConfigError, match="only 19 others"):
            command(config=config, out=tmp_path / "out", **given)
