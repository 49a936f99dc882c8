"""The plain example runs, stays short and free of the package, and the package agrees with it.

The Monte Carlo test is exact, not asymptotic: given the factors s drawn, the noise of all uploads is Gaussian
with covariance sigma^2 B B^T. Whitened by it, n columns of noise are standard normal, their scatter matrix is
Wishart, and its Cholesky factor A has independent entries (Bartlett): A_ii^2 ~ chi^2(n - i), A_ij ~ N(0, 1).
"""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from niss import ShareGraph, effective_variance
from niss.mechanism import add_shares
from niss.randomness import SimStream

SCRIPT = Path(__file__).parents[2] / "examples" / "plain_round.py"
FALSE_ALARM = 1e-6  # of each Monte Carlo test below, all its comparisons together


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("plain_round", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["plain_round"] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules["plain_round"]


def play(example, *, clients=6, coordinates=8, shares=3, tau2=0.1, seed=0, neighbours=None):
    rng = np.random.default_rng(seed)
    updates = rng.normal(size=(clients, coordinates))
    weights = rng.uniform(0.5, 1.5, size=clients)
    return example.play_round(updates, weights / weights.sum(), shares, tau2, rng, neighbours)


def as_package(rnd):
    """The example's graph as a `ShareGraph`, and its factors in that graph's order of edges."""
    clients, shares = rnd.neighbours.shape
    senders, receivers = np.repeat(np.arange(clients), shares), rnd.neighbours.reshape(-1)
    graph = ShareGraph(clients, zip(senders.tolist(), receivers.tolist(), [1.0] * senders.size, strict=True))
    order = np.lexsort((receivers, senders))
    np.testing.assert_array_equal(graph.senders, senders[order])
    np.testing.assert_array_equal(graph.receivers, receivers[order])
    return graph, rnd.scales.reshape(-1)[order], rnd.shares.reshape(senders.size, -1)[order]


def script(*arguments):
    return subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT), *arguments], capture_output=True, text=True, timeout=120
    )


def numbers(output, label):
    """The numbers printed after each line that begins with `label`."""
    found = [line.strip()[len(label) :] for line in output.splitlines() if line.strip().startswith(label)]
    assert found, label
    return [[float(word) for word in line.split()] for line in found]


# The script


def test_it_is_short_and_does_not_use_the_package():
    text = SCRIPT.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Name):
            assert node.id not in {"__import__", "exec", "eval"}
    assert imported == {"argparse", "dataclasses", "numpy"}


def test_script_with_its_defaults():
    done = script()
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    out = done.stdout
    assert out.isascii()
    for party in ("THE TRACKER", "CLIENT 0", "THE SERVER", "THE PROMISE", "THE CATCH"):
        assert f"\n{party}" in out
    assert max(map(len, out.splitlines())) <= 120
    assert len(re.findall(r"^  client \d sends to \d, \d, \d$", out, flags=re.MULTILINE)) == 6
    # 2,000 replays measure a variance to 2 % (one deviation): 12 % is six, and the seed is fixed.
    theory, measured = numbers(out, "one upload: (2 + tau^2) sigma_k^2")[0]
    assert theory == pytest.approx(2.1)
    assert measured == pytest.approx(theory, rel=0.12)
    theory, measured = numbers(out, "the sum, Theorem 2: sum tau^2 sigma_k^2")[0]
    assert theory == pytest.approx(0.6)
    assert measured == pytest.approx(theory, rel=0.12)
    assert numbers(out, "with independent noise: m sigma_k^2") == [[6.0]]
    (left,) = numbers(out, "at tau^2 = 0.1")
    assert len(left) == 6
    assert all(0.0 < value < 2.1 for value in left)
    assert numbers(out, "at tau^2 = 0 ") == [[0.0] * 6]
    protected, bare = numbers(out, "largest error")
    assert protected[0] > 0.1
    assert bare[0] < 1e-12


def test_script_without_distortion():
    done = script("--tau2", "0")
    assert done.returncode == 0, done.stderr
    out = done.stdout
    assert numbers(out, "sum of the uploads") == numbers(out, "the sum without any noise")
    assert numbers(out, "the sum, Theorem 2: sum tau^2 sigma_k^2") == [[0.0, 0.0]]
    assert numbers(out, "at tau^2 = 0 ") == [[0.0] * 6]
    (error,) = numbers(out, "largest error")
    assert error[0] < 1e-12
    assert numbers(out, "x_0 as guessed at tau^2 = 0") == numbers(out, "its update x_0")


def test_script_repeats_itself_and_obeys_its_options():
    options = ["--clients", "4", "--coordinates", "2", "--shares", "2", "--tau2", "0.5", "--seed", "7"]
    first, second = script(*options), script(*options)
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    assert first.stdout.startswith("One round of NISS: 4 clients, 2 coordinates, 2 shares each, tau^2 = 0.5.")
    assert script(*options[:-1], "8").stdout != first.stdout


@pytest.mark.parametrize(
    "options",
    [
        ("--shares", "6"),
        ("--shares", "0"),
        ("--tau2", "-1"),
        ("--tau2", "nan"),
        ("--coordinates", "0"),
        ("--seed", "-1"),
    ],
    ids="=".join,
)
def test_script_refuses_nonsense(options):
    done = script(*options)
    assert done.returncode == 2
    assert "needs 1 <= shares < clients" in done.stderr
    assert "Traceback" not in done.stderr


# The package agrees


@pytest.mark.parametrize(("clients", "shares"), [(2, 1), (6, 1), (6, 3), (6, 5), (25, 7)])
def test_the_tracker_hands_out_a_balanced_graph(example, clients, shares):
    for seed in range(20):
        neighbours = example.hand_out_neighbours(clients, shares, np.random.default_rng(seed))
        assert neighbours.shape == (clients, shares)
        for column in neighbours.T:
            np.testing.assert_array_equal(np.sort(column), np.arange(clients))
            assert not np.any(column == np.arange(clients))
        assert all(len(set(row)) == shares for row in neighbours.tolist())


@pytest.mark.parametrize("tau2", [0.0, 0.1])
def test_uploads_are_updates_and_shares(example, tau2):
    rnd = play(example, tau2=tau2)
    graph, scales, shares = as_package(rnd)
    expected = rnd.weights[:, None] * rnd.updates
    np.add.at(expected, graph.senders, shares)
    np.add.at(expected, graph.receivers, -scales[:, None] * shares)
    np.testing.assert_allclose(rnd.uploads, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("clients", "shares", "tau2"), [(6, 3, 0.1), (6, 5, 0.5), (12, 2, 0.3), (30, 6, 0.07)]
)
def test_joint_view_agrees(example, clients, shares, tau2, seed):
    rnd = play(example, clients=clients, shares=shares, tau2=tau2, seed=seed)
    graph, scales, _ = as_package(rnd)
    assert graph.balanced
    package = effective_variance(graph, unit_variance=rnd.unit_variance, residual_variance=0.0, scales=scales)
    assert package.min() > 0.0
    np.testing.assert_allclose(example.joint_variance(rnd), package, rtol=1e-9, atol=0)


@pytest.mark.parametrize("tau2", [0.0, 0.1, 0.5])
def test_variance_formulas_agree(example, tau2):
    rnd = play(example, tau2=tau2)
    graph, _, _ = as_package(rnd)
    package = float(np.sum(tau2 * rnd.unit_variance * graph.in_weight))
    assert package == pytest.approx(6 * tau2 * example.SIGMA_K2, rel=1e-12)
    assert rnd.unit_variance * graph.out_weight == pytest.approx(np.full(6, example.SIGMA_K2))
    marginal = rnd.unit_variance * (np.diag(graph.laplacian()) + tau2 * graph.in_weight)
    assert marginal == pytest.approx(np.full(6, (2 + tau2) * example.SIGMA_K2), rel=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_without_distortion_there_is_no_privacy(example, seed):
    rnd = play(example, tau2=0.0, seed=seed)
    graph, scales, _ = as_package(rnd)
    np.testing.assert_array_equal(scales, 1.0)
    assert example.joint_variance(rnd).max() < 1e-12
    package = effective_variance(graph, unit_variance=rnd.unit_variance, residual_variance=0.0, scales=scales)
    np.testing.assert_array_equal(package, 0.0)
    for victim in range(6):
        np.testing.assert_allclose(example.attack(rnd, victim), rnd.updates[victim], rtol=0, atol=1e-12)


# The same law, by Monte Carlo

ROUNDS, COORDINATES, TAU2 = 400, 16, 0.3


def example_noise(example, neighbours):
    rng = np.random.default_rng(20240611)
    empty, weights = np.zeros((6, COORDINATES)), np.full(6, 1 / 6)
    for _ in range(ROUNDS):
        rnd = example.play_round(empty, weights, 3, TAU2, rng, neighbours)
        yield rnd.uploads, as_package(rnd)[1]


def package_noise(graph, unit_variance, tau2=TAU2):
    stream = SimStream(20240612)
    for number in range(ROUNDS):
        noise = np.zeros((6, COORDINATES))
        scales = add_shares(
            noise,
            graph,
            unit_variance=unit_variance,
            tau2=tau2,
            distortion="scalar",
            stream=stream.child(number),
        )
        yield noise, scales


def p_values(graph, unit_variance, rounds):
    """Exact two-sided p-values: 21 of the whitened covariance, 2 of the factors."""
    edges = np.arange(graph.senders.size)
    columns, factors = [], []
    for noise, scales in rounds:
        rows = np.zeros((graph.size, edges.size))
        rows[graph.senders, edges] = 1.0
        rows[graph.receivers, edges] = -scales
        columns.append(np.linalg.solve(np.linalg.cholesky(unit_variance * rows @ rows.T), noise))
        factors.append((scales - 1.0) / np.sqrt(TAU2))
    white, factor = np.concatenate(columns, axis=1), np.concatenate(factors)
    bartlett = np.linalg.cholesky(white @ white.T)
    freedom = white.shape[1] - np.arange(graph.size)
    squares = [*zip(np.diag(bartlett) ** 2, freedom, strict=True), (np.sum(factor**2), factor.size)]
    normals = [*bartlett[np.tril_indices(graph.size, -1)], factor.sum() / np.sqrt(factor.size)]
    chi2 = [2 * min(stats.chi2.cdf(value, count), stats.chi2.sf(value, count)) for value, count in squares]
    return np.array(chi2 + [2 * stats.norm.sf(abs(value)) for value in normals])


def test_example_and_package_follow_the_same_law(example):
    rnd = play(example, seed=3)
    graph, _, _ = as_package(rnd)
    mine = p_values(graph, rnd.unit_variance, example_noise(example, rnd.neighbours))
    theirs = p_values(graph, rnd.unit_variance, package_noise(graph, rnd.unit_variance))
    assert mine.size == theirs.size == 23
    # Bonferroni over both: a right pair fails here with probability at most 1e-6.
    assert min(mine.min(), theirs.min()) > FALSE_ALARM / (mine.size + theirs.size)


@pytest.mark.parametrize(
    ("variance_factor", "tau2"),
    [(3.0, TAU2), (1.1, TAU2), (1.0, 1.2 * TAU2)],
    ids=["slip", "variance", "tau2"],
)
def test_the_comparison_has_power(example, variance_factor, tau2):
    # The slip: shares of variance sigma_k^2 = 3 sigma^2, as Algorithm 2 prints them.
    rnd = play(example, seed=3)
    graph, _, _ = as_package(rnd)
    noise = package_noise(graph, variance_factor * rnd.unit_variance, tau2)
    assert p_values(graph, rnd.unit_variance, noise).min() < FALSE_ALARM / 46
