"""A clip that follows the norms: within the clip together with its bit, charged as before, resumed to the last bit."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

import niss
from niss.errors import ConfigError
from niss.mechanism import l2_norm
from niss.mechanism.clipping import AdaptiveClip, bit_weight, room, short_fraction, was_short
from niss.methods import METHODS
from niss.simulation.cuda import DeviceUploads
from niss.simulation.uploads import HostUploads
from support.federation import small_config

ADAPTIVE = {"epsilon": 20.0, "clip": 4.0, "quantile": 0.5, "first_clip": 0.1}
INDEPENDENT = [name for name, method in METHODS.items() if method.private and not method.correlates]


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class TestTheClip:
    def test_it_moves_towards_the_quantile_and_stays_within_its_bounds(self) -> None:
        adaptive = AdaptiveClip(2.0, 0.7, 0.5, rate=0.3)
        assert adaptive.start == 0.5
        assert adaptive.after(0.5, 0.7) == 0.5
        assert adaptive.after(0.5, 0.0) == pytest.approx(0.5 * math.exp(0.3 * 0.7))
        assert adaptive.after(0.5, -9.0) == adaptive.after(0.5, 0.0), (
            "noise moves it no further than a round may"
        )
        assert adaptive.after(0.5, 9.0) == adaptive.after(0.5, 1.0)
        assert adaptive.after(1.99, 0.0) == 2.0
        assert adaptive.after(2e-4, 1.0) == 2e-4
        assert AdaptiveClip(2.0).start == 0.2

    def test_without_noise_it_comes_to_the_quantile(self) -> None:
        norms = np.random.default_rng(1).lognormal(size=1001)
        adaptive, clip = AdaptiveClip(100.0, 0.3, 0.01, rate=0.1), 0.01
        for _ in range(400):
            mean = np.mean([was_short(norm, room(clip)) for norm in norms]) * bit_weight(clip)
            clip = adaptive.after(clip, short_fraction(float(mean), clip))
        assert room(clip) == pytest.approx(np.quantile(norms, 0.3), rel=0.02)

    @pytest.mark.parametrize(
        ("settings", "field"),
        [
            ({"quantile": 0.0}, "quantile"),
            ({"quantile": math.nan}, "quantile"),
            ({"rate": 0.0}, "clip_rate"),
            ({"rate": math.inf}, "clip_rate"),
            ({"first": 2.1}, "first_clip"),
            ({"first": 1e-9}, "first_clip"),
        ],
    )
    def test_settings_that_cannot_be(self, settings, field) -> None:
        with pytest.raises(ConfigError) as refused:
            AdaptiveClip(2.0, **settings)
        assert refused.value.field == field


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("device", [False, True])
def test_update_and_bit_are_within_the_clip_together(dtype, device) -> None:
    if device and dtype == np.float64:
        pytest.skip("devices have float32 rows")
    rng = np.random.default_rng(2)
    rows = rng.normal(size=(40, 300)).astype(dtype) * np.geomspace(1e-3, 10, 40)[:, None].astype(dtype)
    rows[3], rows[7, 5], rows[11, 0] = 0.0, np.nan, np.inf
    clip, weights = 0.7, np.full(40, 1.0 / 8)
    norms = np.sqrt((rows.astype(float) ** 2).sum(axis=1))
    uploads = DeviceUploads(torch.from_numpy(rows.copy())) if device else HostUploads(rows.copy())
    widened, lost = uploads.bound_with_bit(clip, weights)
    found = widened.rows()
    assert widened.shape == (40, 301)
    assert found.dtype == dtype
    assert lost == 2
    assert max(l2_norm(row) for row in found) <= clip / 8
    np.testing.assert_array_equal(found[[3, 7, 11]], 0.0)
    told = np.delete(np.arange(40), [3, 7, 11])
    expected = np.where(norms[told] <= room(clip), 1.0, -1.0) * bit_weight(clip) / 8
    np.testing.assert_allclose(found[told, -1], expected, rtol=1e-6)
    assert set(np.sign(found[told, -1])) == {-1.0, 1.0}


class TestRuns:
    @pytest.mark.parametrize("method", INDEPENDENT)
    def test_every_method_that_clips_follows_the_norms_at_the_same_charge(self, method, given) -> None:
        """From a clip that is far too small it grows, and what the rounds cost is what they cost with a fixed one."""
        settings = {"methods": [{"name": method, "neighbours": 3}], "rounds": 6}
        found = niss.run(small_config(privacy=ADAPTIVE, **settings), **given)
        fixed = niss.run(small_config(privacy={"epsilon": 20.0, "clip": 4.0}, **settings), **given)
        clips = [line.clip for line in found.rounds]
        assert clips[-1] > clips[0] == 0.1
        assert found.epsilon == pytest.approx(fixed.epsilon, rel=1e-9)
        assert any("followed a quantile" in one and "charged" in one for one in found.statement.caveats)
        # Noise is in proportion to the clip of the round.
        for one, other in zip(found.rounds, fixed.rounds, strict=True):
            ratio = one.aggregate_variance_predicted / other.aggregate_variance_predicted
            assert ratio == pytest.approx((one.clip / 4.0) ** 2, rel=1e-6)
            for view in ("mu_joint", "mu_marginal", "mu_outsider"):
                assert getattr(one, view) == pytest.approx(getattr(other, view), rel=1e-9)

    def test_fedavg_beside_the_others_does_not_clip(self, given, tmp_path) -> None:
        config = small_config(privacy=ADAPTIVE, methods=[{"name": "fedavg"}, {"name": "dp-fedavg"}])
        niss.compare(config, **given, out=tmp_path / "a")
        assert all(line["clip"] is None for line in lines(tmp_path / "a" / "fedavg"))
        assert all(line["clip"] is not None for line in lines(tmp_path / "a" / "dp-fedavg"))

    def test_the_real_protocol_does_the_same(self, given) -> None:
        config = small_config(privacy=ADAPTIVE, exchange="protocol", rounds=6)
        result = niss.run(config, **given)
        clips = [line.clip for line in result.rounds]
        assert clips[-1] > clips[0] == 0.1
        assert result.epsilon <= 20.0 * (1 + 1e-9)

    def test_a_round_that_is_lost_leaves_the_clip_as_it_was(self, given) -> None:
        methods = [{"name": "secagg-ddg", "threshold": 5}]
        config = small_config(privacy={**ADAPTIVE, "dropout": 0.3}, rounds=6, methods=methods)
        found = niss.run(config, **given).rounds
        lost = [place for place, line in enumerate(found[:-1]) if line.void]
        assert lost, "the seed loses some"
        for place in lost:
            assert found[place].below_clip is None
            assert found[place + 1].clip == found[place].clip
