"""Uploads on a device do what uploads on the processor do; plain torch, so the processor can stand in."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from niss.errors import ConfigError
from niss.graph import ShareGraph
from niss.mechanism import l2_norm
from niss.randomness import SimStream
from niss.simulation import cuda as noise_on_device
from niss.simulation.cuda import DeviceUploads
from niss.simulation.uploads import HostUploads, Seats

CLIENTS, COORDINATES = 70, 501  # more rows than are clipped at once


@pytest.fixture(autouse=True)
def _without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise_on_device, "_triton_installed", lambda: False)


def _rows() -> np.ndarray:
    rows = SimStream(1).generator().normal(0.0, 0.1, (CLIENTS, COORDINATES)).astype(np.float32)
    rows[:20] *= 0.01
    rows[20] = 0.0
    return rows


def _on(device: str, rows: np.ndarray) -> DeviceUploads:
    return DeviceUploads(torch.from_numpy(rows.copy()).to(device))


ON_DEVICES = [
    pytest.param(partial(_on, "cpu"), id="stand-in"),
    pytest.param(
        partial(_on, "cuda"),
        id="cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    ),
]
on_devices = pytest.mark.parametrize("on_device", ON_DEVICES)
everywhere = pytest.mark.parametrize("make", [pytest.param(HostUploads, id="host"), *ON_DEVICES])
Make = Callable[[np.ndarray], HostUploads]


@on_devices
@pytest.mark.parametrize("clipping", ["none", "l2", "elements"])
def test_bounds_like_the_processor(clipping: str, on_device: Make) -> None:
    rows, weights = _rows(), np.linspace(0.1, 1.0, CLIENTS)
    rows[3, 7], rows[69, 0], rows[40, 5] = np.nan, np.inf, -np.inf
    here, there = HostUploads(rows.copy()), on_device(rows)
    assert here.bound(clipping, 0.3, weights) == there.bound(clipping, 0.3, weights) == 3
    np.testing.assert_allclose(there.rows(), here.rows(), rtol=3e-6, atol=1e-9)
    assert not there.rows()[[3, 40, 69]].any()


@on_devices
def test_no_row_is_longer_than_the_clip(on_device: Make) -> None:
    for scale in (1e-30, 1.0, 1e30):
        rows = (_rows() * np.float32(scale)).astype(np.float32)
        there = on_device(rows)
        clip = 0.37 * scale
        there.bound("l2", clip, np.ones(CLIENTS))
        norms = [l2_norm(row) for row in there.rows()]
        assert max(norms) <= clip
        long = [number for number, row in enumerate(rows) if l2_norm(row) > clip]
        assert min(norms[number] for number in long) > clip * (1.0 - 1e-6)


@on_devices
def test_totals_are_sums_in_float64(on_device: Make) -> None:
    rows = _rows()
    rows[0], rows[1] = 3e7, -3e7
    np.testing.assert_allclose(on_device(rows).total(), HostUploads(rows).total(), rtol=1e-12, atol=1e-7)
    some = np.array([0, 2], dtype=np.int64)
    for uploads in (on_device(rows), HostUploads(rows)):
        np.testing.assert_allclose(uploads.total(some), rows[some].sum(axis=0), rtol=1e-5, atol=1e-6)


@everywhere
def test_carried_noise_has_its_law_and_cancels_one_round_later(make: Make) -> None:
    """Two rounds that have one vector in common, one row left out of the first; then single edges, at both ends."""
    seats, coordinates, gap = np.array([0, 1, 3, 4], dtype=np.int64), 60_000, SimStream(1).child("gap")
    rounds = [make(np.zeros((5, coordinates), dtype=np.float32)) for _ in range(2)]
    rounds[0].add_spread(seats, 2.0, [(0.5, gap)], SimStream(2))
    rounds[1].add_spread(np.arange(5), 1.0, [(-0.4, gap), (0.3, SimStream(4))], SimStream(3))
    rows = np.concatenate([one.rows() for one in rounds])
    assert not rows[2].any()
    expected = np.zeros((10, 10))
    expected[np.ix_(seats, seats)] = 2.0 * (np.eye(4) - 0.25) + 0.25
    expected[5:, 5:] = np.eye(5) - 0.2 + 0.16 + 0.09
    expected[np.ix_(seats, range(5, 10))] = expected[np.ix_(range(5, 10), seats)] = -0.2
    # Six deviations of a mean of products of variables whose variances are at most 2.
    assert np.abs(rows @ rows.T / coordinates - expected).max() < 6.0 * 2.0 * np.sqrt(2.0 / coordinates)

    again = make(np.zeros((5, coordinates), dtype=np.float32))
    again.add_spread(seats, 2.0, [(0.5, gap)], SimStream(2))
    assert np.array_equal(again.rows(), rounds[0].rows())
    blank = rounds[0].blank(Seats.all(3))
    assert blank.shape == (3, coordinates)
    assert not blank.rows().any()


@everywhere
def test_own_noise_has_its_deviation_and_is_repeatable(make: Make) -> None:
    deviations = np.linspace(0.0, 2.0, CLIENTS)
    drawn = []
    for seed in (1, 1, 2):
        uploads = make(np.zeros((CLIENTS, 20_000), dtype=np.float32))
        uploads.add_own_noise(deviations, SimStream(seed))
        drawn.append(uploads.rows())
    assert np.array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])
    found = drawn[0].std(axis=1)
    # The deviation of 20,000 draws is known to 0.5 %; six times that, for 70 rows: false alarm below 1e-6.
    assert np.abs(found[1:] / deviations[1:] - 1.0).max() < 0.03
    assert not drawn[0][0].any()


@on_devices
def test_shares_cancel_and_the_factors_kept_are_those_of_the_processor(on_device: Make) -> None:
    graph = ShareGraph.complete(5)
    zeros = np.zeros((5, 10_001), dtype=np.float32)
    there = on_device(zeros)
    options = {"unit_variance": 1.0, "stream": SimStream(8)}
    assert there.add_shares(graph, tau2=0.0, distortion="additive", **options) is None
    assert np.abs(there.total()).max() < 1e-4
    # Variance 8 from 50,005 correlated draws: 0.3 is more than five deviations.
    assert abs(float(there.rows().var()) - 8.0) < 0.3
    kept_there = on_device(zeros)
    kept_here = HostUploads(zeros.copy())
    found = [
        one.add_shares(graph, tau2=0.1, distortion="coordinate", keep_factors=True, **options)
        for one in (kept_there, kept_here)
    ]
    assert found[0] is not None
    assert found[0].shape == (20, 10_001)
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(kept_there.rows(), kept_here.rows())


def test_rows_in_another_precision_are_refused() -> None:
    with pytest.raises(ConfigError, match="float32"):
        DeviceUploads(torch.zeros(2, 3, dtype=torch.float64))


NOISES: dict[str, Callable[[Any], object]] = {
    "own": lambda uploads: uploads.add_own_noise(np.linspace(0.5, 1.5, 7), SimStream(4)),
    "spread": lambda uploads: uploads.add_spread(
        np.array([0, 1, 3, 4, 6]), 2.0, [(0.5, SimStream(5)), (-0.3, SimStream(6))], SimStream(4)
    ),
    **{
        f"{graph} {distortion}": lambda uploads, graph=graph, distortion=distortion: uploads.add_shares(
            share_graph(graph), unit_variance=3.0, tau2=0.2, distortion=distortion, stream=SimStream(4)
        )
        for graph in ("regular", "complete")
        for distortion in ("additive", "scalar", "coordinate")
    },
}


def share_graph(kind: str) -> ShareGraph:
    return ShareGraph.complete(7) if kind == "complete" else ShareGraph.regular(7, degree=2, beacon=b"beacon")


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("noise", NOISES)
def test_parts_of_the_rows_add_up_to_all_of_them(noise: str, device: bool) -> None:
    """Three processes, one without a row: the same noise, the same factors, the same sum over any seats."""
    rows = np.random.default_rng(3).standard_normal((7, 1001)).astype(np.float32)

    def make(seats: Seats) -> Any:
        mine = rows[seats.mine].copy()
        return DeviceUploads(torch.from_numpy(mine), seats) if device else HostUploads(mine, seats)

    whole = make(Seats.all(7))
    parts = [make(Seats(7, np.array(seats, dtype=np.int64))) for seats in ([0, 2, 5], [1, 3, 4, 6], [])]
    expected, found = NOISES[noise](whole), [NOISES[noise](part) for part in parts]
    for factors in found:
        np.testing.assert_array_equal(factors, expected)
    for seats in (None, np.array([0, 1, 4, 5])):
        total = sum(part.total(seats) for part in parts)
        np.testing.assert_allclose(total, whole.total(seats), rtol=1e-5, atol=2e-5)
    assert np.abs(whole.rows() - rows).max() > 0.5


def test_each_row_has_the_ends_of_its_own_edges() -> None:
    """What the kernel is given for some of the rows is what it is given for them among all."""
    graph = share_graph("regular")
    count = graph.senders.size
    drawn = noise_on_device._Noise(*np.random.default_rng(1).random((3, count)), np.zeros(7), 5)

    def ends(seats: list[int]) -> list[list[tuple[float, ...]]]:
        made = noise_on_device._Ends.of(graph, np.array(seats, dtype=np.int64), drawn)
        entries = list(zip(made.names.tolist(), made.scales.tolist(), made.taus.tolist(), strict=True))
        return [entries[start:end] for start, end in pairwise(made.starts.tolist())]

    whole = ends(list(range(7)))
    assert sum(map(len, whole)) == 2 * count
    assert ends([1, 4, 6]) == [whole[1], whole[4], whole[6]]
    assert ends([]) == []
