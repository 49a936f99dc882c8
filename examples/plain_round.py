"""One round of NISS (the paper's Algorithm 2) in plain numpy. Read it top to bottom, then run it.

The idea: every client hides its update under noise, and hands the negative of that noise to other clients,
who add it to theirs. Each upload looks noisy; in the server's sum the noise cancels. The catch comes last.
"""

import argparse
from dataclasses import dataclass

import numpy as np

SIGMA_K2 = 1.0  # sigma_k^2: the noise variance each client wants on its upload, set by its privacy budget
REPEATS = 2000  # rounds replayed with fresh noise, to measure variances


@dataclass
class Round:
    updates: np.ndarray  # (m, h)    x_k, private to client k
    weights: np.ndarray  # (m,)      p_k, public, summing to 1
    neighbours: np.ndarray  # (m, v) client k sends its share i to neighbours[k, i]: the edges of the graph
    shares: np.ndarray  # (m, v, h)  n_i of client k, known to k and to that neighbour
    scales: np.ndarray  # (m, v)     s_i drawn for that share by the neighbour who received it
    uploads: np.ndarray  # (m, h)    what the server sees
    unit_variance: float  # sigma^2 = sigma_k^2 / v, the variance of one share
    true_sum: np.ndarray  # (h,)     sum_k p_k x_k, what the server is after


def hand_out_neighbours(m, v, rng):
    """The tracker's job: v different receivers for each of m clients, everybody receiving exactly v shares.

    Seat the clients round a table at random, and draw v different distances; "the client that far to my left"
    is then a derangement (a permutation in which nobody gets itself), and the v derangements share no edge.
    Why not a random list, as in the paper? What fails to cancel is one term per share RECEIVED. Theorem 2
    writes it as tau_k^2 sigma_k^2, with the sigma_k^2 = v sigma^2 that client k SENDS, so it needs balance:
    in = out. With random lists a client may receive no share at all, and have no distortion to hide behind.
    """
    seats = rng.permutation(m)
    seat_of = np.argsort(seats)
    distances = 1 + rng.permutation(m - 1)[:v]
    return seats[(seat_of[:, None] + distances) % m]


def play_round(updates, weights, shares_each, tau2, rng, neighbours=None):
    """Algorithm 2 for all clients at once; draws the graph too, unless it is given."""
    (m, h), v = updates.shape, shares_each
    neighbours = hand_out_neighbours(m, v, rng) if neighbours is None else neighbours
    # Algorithm 2 prints N(0, sigma_k^2 I) for each n_i. That is a slip: v such shares add up to v sigma_k^2.
    # The text and the proofs need the "unit noise" sigma^2 = sigma_k^2 / v, so that v of them make sigma_k^2.
    unit_variance = SIGMA_K2 / v
    shares, scales = np.empty((m, v, h)), np.empty((m, v))
    uploads = weights[:, None] * updates  # p_k x_k
    inbox = [[] for _ in range(m)]
    for k in range(m):  # every client k ...
        for i in range(v):
            shares[k, i] = rng.normal(0.0, np.sqrt(unit_variance), size=h)  # ... draws n_i,
            uploads[k] += shares[k, i]  # adds it to its own upload,
            inbox[neighbours[k, i]].append((k, i, -shares[k, i]))  # and sends -n_i to its neighbour u_i.
    for k in range(m):
        for sender, i, received in inbox[k]:  # It takes each r_i it was sent,
            scales[sender, i] = rng.normal(1.0, np.sqrt(tau2))  # distorts it by s_i (a secret of its own),
            uploads[k] += scales[sender, i] * received  # and adds it. The result goes to the server.
    return Round(updates, weights, neighbours, shares, scales, uploads, unit_variance, weights @ updates)


def joint_variance(rnd):
    """1 / (Sigma^-1)_kk for every client k: the noise left on upload k for one who knows all the others'.

    The uploads' noise is B n: row k of B says how much of each share is in upload k (+1 for a share sent,
    -s for one received), so Sigma = sigma^2 B B^T, given the s drawn. The part of row k that the other rows
    cannot imitate is the noise that stays; least squares finds it, even where Sigma has no inverse (then 0).
    """
    m, v = rnd.neighbours.shape
    rows = np.zeros((m, m * v))
    for edge, (k, i) in enumerate(np.ndindex(m, v)):
        rows[k, edge] = 1.0
        rows[rnd.neighbours[k, i], edge] = -rnd.scales[k, i]
    left = np.empty(m)
    for k in range(m):
        others = np.delete(rows, k, axis=0).T
        left[k] = np.sum((rows[k] - others @ np.linalg.lstsq(others, rows[k], rcond=None)[0]) ** 2)
    return rnd.unit_variance * left


def attack(rnd, victim):
    """A server that knows the other updates takes them off the sum of all uploads: its guess of x_victim."""
    others = rnd.true_sum - rnd.weights[victim] * rnd.updates[victim]
    return (rnd.uploads.sum(axis=0) - others) / rnd.weights[victim]


def row(label, values):
    print(f"  {label:<40}" + " ".join(f"{value:8.3f}" for value in np.atleast_1d(values)[:8]))


def main():
    parser = argparse.ArgumentParser(description="One round of NISS, explained as it goes.")
    parser.add_argument("--clients", type=int, default=6, help="m, clients in the round (default 6)")
    parser.add_argument("--coordinates", type=int, default=8, help="h, length of an update (default 8)")
    parser.add_argument("--shares", type=int, default=3, help="v, shares each client sends (default 3)")
    parser.add_argument("--tau2", type=float, default=0.1, help="tau^2, variance of s_i (default 0.1)")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers (default 0)")
    args = parser.parse_args()
    m, h, v, tau2 = args.clients, args.coordinates, args.shares, args.tau2
    if not (1 <= v < m and h >= 1 and 0 <= tau2 < np.inf and args.seed >= 0):
        parser.error("needs 1 <= shares < clients, coordinates >= 1, a finite tau2 >= 0, seed >= 0")
    rng = np.random.default_rng(args.seed)
    sizes = rng.integers(50, 150, size=m)  # samples per client
    rnd = play_round(rng.normal(size=(m, h)), sizes / sizes.sum(), v, tau2, rng)

    print(f"One round of NISS: {m} clients, {h} coordinates, {v} shares each, tau^2 = {tau2:g}.")
    print(f"Every client wants noise of variance sigma_k^2 = {SIGMA_K2:g}; a share has {SIGMA_K2 / v:.3f}.")
    print("\nTHE TRACKER knows who is live and who sends to whom. It sees no noise and no update.")
    for k in range(m):
        print(f"  client {k} sends to {', '.join(map(str, rnd.neighbours[k]))}")
    print("\nCLIENT 0 knows its update, the shares it drew, the shares it received and its own factors s.")
    print("It does not know other updates, shares between others, or how others distort its shares.")
    row("its update x_0", rnd.updates[0])
    row("its part of the sum, p_0 x_0", rnd.weights[0] * rnd.updates[0])
    for i in range(v):
        row(f"share n, and -n sent to client {rnd.neighbours[0, i]}", rnd.shares[0, i])
    for k, i in np.argwhere(rnd.neighbours == 0):
        row(f"r from client {k}, added {rnd.scales[k, i]:.3f} times", -rnd.shares[k, i])
    print("\nTHE SERVER knows every upload, hence their sum. It sees no share.")
    for k in range(m):
        row(f"upload of client {k}", rnd.uploads[k])
    row("sum of the uploads", rnd.uploads.sum(axis=0))
    row("the sum without any noise", rnd.true_sum)
    measured = np.zeros(2)
    for _ in range(REPEATS):
        again = play_round(rnd.updates, rnd.weights, v, tau2, rng, rnd.neighbours)
        noise = again.uploads - again.weights[:, None] * again.updates
        measured += np.array([np.mean(noise**2), np.mean(noise.sum(axis=0) ** 2)]) / REPEATS
    print(f"\nTHE PROMISE: noisy uploads, a cleaner sum. Noise variance in theory, and in {REPEATS} replays:")
    row("one upload: (2 + tau^2) sigma_k^2", [(2 + tau2) * SIGMA_K2, measured[0]])
    row("the sum, Theorem 2: sum tau^2 sigma_k^2", [m * tau2 * SIGMA_K2, measured[1]])
    row("with independent noise: m sigma_k^2", m * SIGMA_K2)
    bare = play_round(rnd.updates, rnd.weights, v, 0.0, rng, rnd.neighbours)
    print("\nTHE CATCH: the server sees ALL uploads, and their noise is related. To one that knows the other")
    print(f"updates and the factors s, clients 0, 1, ... keep noise of variance (each wants {SIGMA_K2:g})")
    for setting, seen in {tau2: rnd, 0.0: bare}.items():
        row(f"at tau^2 = {setting:g}", joint_variance(seen))
    print("The attack on client 0: take the others' parts off the sum of all uploads, and divide by p_0.")
    for setting, seen in {tau2: rnd, 0.0: bare}.items():
        row(f"x_0 as guessed at tau^2 = {setting:g}", attack(seen, 0))
        print(f"    largest error {np.abs(attack(seen, 0) - seen.updates[0]).max():.1e}")
    print("At tau^2 = 0 there is no privacy. Choose tau^2 for this joint view, not for one upload alone.")


if __name__ == "__main__":
    main()
