"""All that is wrong is said at once; that it is said before anything heavy is loaded, tests/e2e shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from niss.cli.plan import plan_command
from niss.cli.simulate import compare_command, run_command
from niss.errors import ConfigError


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
