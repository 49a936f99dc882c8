"""Dealing a labelled dataset out to clients: IID, by label shards, by Dirichlet proportions, or to its owners.

`shards` is the pathological split of McMahan et al. (2017): sort by label, cut into shards, deal a few to
each client. `dirichlet` is the split of Hsu, Qi and Brown (2019), drawn class by class. All are fixed by a
stream, and the small tools at the end keep them so: a reproducible random order, and fair whole-number shares.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import numpy.typing as npt

from niss.checks import require_one_of, require_real, require_whole
from niss.errors import ConfigError
from niss.randomness import SimStream

SPLITS = ("iid", "shards", "dirichlet")
Indices = npt.NDArray[np.int64]


def partition(
    labels: npt.NDArray[Any],
    *,
    clients: int,
    split: str,
    stream: SimStream,
    samples_per_client: int | None = None,
    shards_per_client: int = 2,
    alpha: float = 0.5,
    size_ratio: float = 1.0,
) -> list[Indices]:
    """The indices each client holds: non-empty, disjoint, ascending, and fixed by labels and stream.

    labels               one class number for each sample
    clients              how many there are
    split                one of `SPLITS`, see below
    stream               the source of all randomness
    samples_per_client   None: every sample goes to exactly one client. A number: every client gets exactly that many,
                         drawn uniformly from all (`iid` and `shards` only)
    shards_per_client    for `shards`
    alpha                the concentration, for `dirichlet`
    size_ratio           the largest client over the smallest, for `iid` and `shards` of all samples: client k of n has
                         `size_ratio^(-k / (n - 1))` times what client 0 has, up to whole samples

    - `iid`: a random deal; sizes differ by at most one where the ratio is 1.
    - `shards`: each client gets `shards_per_client` random runs of the samples sorted by label; the sizes of a
      client's shards differ by at most one, and those of clients are as with `iid`.
    - `dirichlet`: each class is shared out in proportions drawn from Dir(alpha): a small alpha gives a
      class to few clients, a large one to all alike. A client left with nothing is given one sample of
      the then largest client.

    Raises `ConfigError`, which names the argument, for values that cannot be used or that need more samples than
    there are.
    """
    labels = _checked_labels(labels)
    require_whole(clients, field="clients", at_least=1)
    require_whole(shards_per_client, field="shards_per_client", at_least=1)
    require_one_of(split, SPLITS, field="split")
    uneven = "0.1 gives very uneven clients, 0.5 uneven ones, 100 nearly equal ones"
    require_real(alpha, field="alpha", zero_allowed=False, hint=uneven)
    wanted = _wanted(len(labels), clients, split, samples_per_client)
    if size_ratio != 1.0 and (split == "dirichlet" or samples_per_client is not None):
        settled = "the dirichlet split" if split == "dirichlet" else "samples_per_client"
        raise ConfigError(
            f"{settled} settles how many samples a client has",
            field="size_ratio",
            hint="leave one of them out",
        )
    if split == "dirichlet":
        return _dirichlet(labels, clients, alpha, stream.child("dirichlet"))
    sizes = _sizes(wanted, clients, size_ratio)
    if split == "shards" and min(sizes) < shards_per_client:
        raise ConfigError(
            f"{shards_per_client} shards each, and the smallest of {clients} clients has {min(sizes)} of {wanted} "
            "samples",
            field="shards_per_client",
            hint=f"at most {min(sizes)} would fit",
        )
    pool = random_order(len(labels), stream.child("pool"))[:wanted]
    if split == "iid":
        return [np.sort(part) for part in _cut(pool, sizes)]
    return _shards(labels, pool, sizes, shards_per_client, stream.child("shards"))


def partition_by_owner(
    owners: npt.NDArray[np.int64], *, clients: int, stream: SimStream, most: int | None = None
) -> list[Indices]:
    """The samples of each client where they come from clients: the natural partition.

    owners    for each sample the number of its client, from 0 without a gap
    clients   how many of them; fewer than there are are drawn uniformly, and stay in their order
    stream    the source of all draws
    most      most samples of a client; who has more keeps so many, drawn at random, in their order. None: all

    Raises `ConfigError` where there are fewer clients than asked for.
    """
    there = int(owners.max(initial=-1)) + 1
    require_whole(clients, field="clients", at_least=1)
    if clients > there:
        raise ConfigError(
            f"the samples belong to {there} clients, not {clients}",
            field="clients",
            hint=f"use at most {there}, or leave it out for all of them",
        )
    chosen = np.sort(random_order(there, stream.child("owners"))[:clients])
    by_owner = _cut(np.argsort(owners, kind="stable").astype(np.int64), np.bincount(owners).tolist())
    if most is None:
        return [by_owner[owner] for owner in chosen]
    require_whole(most, field="samples_per_client", at_least=1)
    orders = (random_order(len(by_owner[owner]), stream.child("kept", int(owner)))[:most] for owner in chosen)
    return [by_owner[owner][np.sort(order)] for owner, order in zip(chosen, orders, strict=True)]


def _sizes(total: int, clients: int, ratio: float) -> list[int]:
    """How many samples each client has, the first most; `ConfigError` where that leaves nothing for the last."""
    require_real(ratio, field="size_ratio", zero_allowed=False)
    if ratio < 1.0:
        raise ConfigError(
            f"is the largest over the smallest, not {ratio!r}", field="size_ratio", hint="use 1 or more"
        )
    sizes: list[int] = largest_remainder(total, ratio ** -np.linspace(0.0, 1.0, clients)).tolist()
    if min(sizes) < 1:
        raise ConfigError(
            f"the smallest of {clients} clients would have none of {total} samples",
            field="size_ratio",
            hint="lower it, or use fewer clients",
        )
    return sizes


def _shards(
    labels: npt.NDArray[Any], pool: Indices, sizes: list[int], shards_per_client: int, stream: SimStream
) -> list[Indices]:
    """Sort by label, cut into runs, deal the runs out at random; see `partition`."""
    # The pool is in random order already, so a stable sort leaves equal labels in random order.
    by_label = pool[np.argsort(labels[pool], kind="stable")]
    # A shard's size is settled by its owner, so that every client's total comes out as asked.
    shards = [
        (owner, size) for owner, total in enumerate(sizes) for size in even_sizes(total, shards_per_client)
    ]
    dealt = [shards[place] for place in random_order(len(shards), stream)]
    hands: list[list[Indices]] = [[] for _ in sizes]
    for (owner, _), run in zip(dealt, _cut(by_label, [size for _, size in dealt]), strict=True):
        hands[owner].append(run)
    return [np.sort(np.concatenate(hand)) for hand in hands]


def _dirichlet(labels: npt.NDArray[Any], clients: int, alpha: float, stream: SimStream) -> list[Indices]:
    """Share out each class in proportions of its own draw from Dir(alpha), rounded so that nothing is lost."""
    classes = np.unique(labels)
    counts = np.empty((len(classes), clients), dtype=np.int64)
    for row, label in enumerate(classes):
        proportions = _dirichlet_proportions(alpha, clients, stream.child("proportions", int(label)))
        counts[row] = largest_remainder(int(np.count_nonzero(labels == label)), proportions)
    _leave_nobody_empty(counts)
    hands: list[list[Indices]] = [[] for _ in range(clients)]
    for row, label in enumerate(classes):
        members = np.flatnonzero(labels == label)
        members = members[random_order(len(members), stream.child("members", int(label)))]
        for owner, run in enumerate(_cut(members, counts[row].tolist())):
            hands[owner].append(run)
    return [np.sort(np.concatenate(hand)) for hand in hands]


def _dirichlet_proportions(alpha: float, clients: int, stream: SimStream) -> npt.NDArray[np.float64]:
    """One draw from the symmetric Dirichlet, as normalised Gamma(alpha) variates taken in logarithms.

    Gamma(a) is Gamma(a + 1) * U^(1/a). In logarithms neither a tiny alpha (where every variate underflows
    to zero) nor a huge one (where their sum overflows) leaves the range of a double.
    """
    generator = stream.generator()
    logs = np.log(generator.standard_gamma(alpha + 1.0, clients))
    # 1 - U lies in (0, 1]; the floor on alpha keeps the quotient finite, and by then one client has all.
    logs += np.log1p(-generator.random(clients)) / max(alpha, 1e-300)
    weights = np.exp(logs - logs.max())
    proportions: npt.NDArray[np.float64] = weights / weights.sum()
    return proportions


def _leave_nobody_empty(counts: npt.NDArray[np.int64]) -> None:
    """Move single samples, each from the largest client's largest class, to the clients without any."""
    totals = counts.sum(axis=0)
    largest_first = [(-int(total), owner) for owner, total in enumerate(totals)]
    heapq.heapify(largest_first)
    for empty in np.flatnonzero(totals == 0):
        size, donor = largest_first[0]
        row = int(counts[:, donor].argmax())
        counts[row, donor] -= 1
        counts[row, empty] += 1
        # The client just served holds one sample and is never the largest again while any is needed.
        heapq.heapreplace(largest_first, (size + 1, donor))


def _cut(order: Indices, sizes: list[int]) -> list[Indices]:
    """`order` in pieces of these sizes."""
    return np.split(order, np.cumsum(sizes)[:-1])


def _wanted(available: int, clients: int, split: str, samples_per_client: int | None) -> int:
    """How many samples are dealt out, or why these clients cannot have what was asked for."""
    if samples_per_client is None:
        if available < clients:
            raise ConfigError(
                f"{clients} clients cannot share {available} samples: each needs at least one",
                field="clients",
                hint=f"use at most {available} clients",
            )
        return available
    if split == "dirichlet":
        raise ConfigError(
            "cannot be combined with the dirichlet split, which itself decides how many samples a client has",
            field="samples_per_client",
            hint="leave samples_per_client out, or use the split 'iid' or 'shards'",
        )
    require_whole(samples_per_client, field="samples_per_client", at_least=1)
    each = samples_per_client
    if clients * each > available:
        ways_out = [f"at most {available // clients} samples each"] if available >= clients else []
        ways_out += [f"at most {available // each} clients"] if available >= each else []
        raise ConfigError(
            f"{clients} clients with {each} samples each need {clients * each}, and there are {available}",
            field="samples_per_client",
            hint="use " + (" or ".join(ways_out) or "fewer clients and fewer samples each"),
        )
    return clients * each


def _checked_labels(labels: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Labels as an array of class numbers, one for each sample; `ConfigError` for anything else."""
    array = np.asarray(labels)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ConfigError(
            f"must be a one-dimensional array of whole numbers, not {array.dtype} of shape {array.shape}",
            field="labels",
            hint="pass one class number per sample, such as dataset.train_labels",
        )
    if array.size == 0:
        raise ConfigError("there are no samples to share", field="labels", hint="pass at least one label")
    return array


def random_order(count: int, stream: SimStream) -> npt.NDArray[np.int64]:
    """A uniformly random order of 0 .. count-1, fixed by the stream.

    Sorts random keys rather than calling `Generator.permutation`: numpy may change that method's numbers
    between versions, while plain uniform doubles are as stable as it gets.
    """
    return np.argsort(stream.generator().random(count), kind="stable").astype(np.int64)


def largest_remainder(total: int, weights: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Whole shares of `total` in proportion to `weights`, each within one of its exact share.

    Every share is rounded down, and what is left goes one by one to the largest remainders (the earlier
    place wins a tie): Hamilton's method. The shares sum to `total`.
    """
    exact = weights * (total / weights.sum())
    shares: npt.NDArray[np.int64] = np.floor(exact).astype(np.int64)
    left = total - int(shares.sum())
    shares[np.argsort(shares - exact, kind="stable")[:left]] += 1
    return shares


def even_sizes(total: int, parts: int) -> list[int]:
    """`total` cut into `parts` sizes that differ by at most one, the larger ones first."""
    base, extra = divmod(total, parts)
    return [base + (place < extra) for place in range(parts)]
