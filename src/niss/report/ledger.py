"""What the clients of a run spent, read from its ledger, whose hash chain is verified on the way.

A client's total after some rounds is `mu = sqrt(sum mu_r^2)` over those it took part in, and its epsilon the one of
Gaussian differential privacy at that mu and the ledger's delta; where records are hidden it is the slots that it took
(`niss.mechanism.slots`). Such a total is called "spent": it says where the client stands. Only the budget, fixed before
the first round, is a claim.

Charges may rest on a heuristic. Their mu is then a label that proves nothing, and no epsilon is made from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from niss.accounting import Charge, LedgerFile
from niss.accounting.ledger import Amount, Limit, client_order
from niss.charts import evenly_spaced
from niss.claims import NOT_APPLICABLE, digits, rounded_up
from niss.errors import PrivacyError
from niss.files import LIMITS, find_json
from niss.mechanism import Slots
from niss.runs.folder import MethodResult, ReportInput
from niss.runs.privacy import read_ledger

# A curve of so many steps looks no different from one of more.
MOST_ROUNDS = 150
# Epsilon of slots is computed for so many numbers of them.
_STEPS = 50

# So many clients can be drawn as lines of their own; of more, the spread is drawn.
MOST_LINES = 40

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class ClientRow:
    """One client's totals over all charges so far.

    participations  how many charges it had
    spent           mu, infinite where an upload had no noise at all; or slots where records are hidden
    epsilon_spent   None where nothing is guaranteed
    epsilon_claim   its budget, None where nothing was promised
    """

    client: str
    participations: int
    spent: Amount
    epsilon_spent: float | None
    epsilon_claim: float | None


@dataclass(frozen=True)
class Spending:
    """Epsilon spent by the clients of one method after each of `rounds`, at the `delta` of its ledger.

    rounds               numbers of rounds, from 0 (nothing spent) to the last; at most `MOST_ROUNDS` of them
    least, median, most  over all clients, those that never took part included
    lines                each client's own curve where they are at most `MOST_LINES`, else nothing
    budget               the largest claim, None where nothing was promised
    """

    label: str
    delta: float
    rounds: tuple[int, ...]
    least: FloatArray
    median: FloatArray
    most: FloatArray
    lines: tuple[FloatArray, ...]
    budget: float | None


def is_heuristic(ledger: LedgerFile) -> bool:
    """Whether any charge rests on a heuristic, so that its numbers are labels and promise nothing."""
    return any(entry.basis.get("heuristic") is True for entry in ledger.entries)


def client_rows(ledger: LedgerFile, most: int | None = None) -> list[ClientRow]:
    """One row per client, the worst-off first: by what it spent, then by how often it took part, then by name.

    All epsilons are None where the ledger rests on a heuristic. `most`: so many rows are enough.
    """
    heuristic = is_heuristic(ledger)

    @cache
    def epsilon(amount: Amount | None) -> float | None:
        return None if amount is None or heuristic else ledger.epsilon(amount)

    def row_of(client: str) -> ClientRow:
        return ClientRow(
            client,
            ledger.participations(client),
            ledger.spent(client),
            epsilon(ledger.spent(client)),
            epsilon(ledger.budget(client)),
        )

    charged = list(map(row_of, ledger.charged))
    # Totals that differ by rounding alone count as equal.
    charged.sort(key=lambda row: (-round(_size(row.spent), 9), -row.participations, client_order(row.client)))
    # Who was never charged is not worse off than anybody.
    known = set(ledger.charged)
    others = (row_of(client) for client in ledger.clients if client not in known)
    return [*charged, *others] if most is None else list(islice(chain(charged, others), most))


def _size(amount: Amount) -> float:
    return amount.size if isinstance(amount, Slots) else amount


def spending(ledger: LedgerFile, client: str) -> list[tuple[int, int, float, float | None]]:
    """A client's charges in order: round, attempt, mu of the charge, and epsilon spent up to and with it.

    A round that was tried several times is charged for each attempt. Epsilon is None where nothing is guaranteed.
    """
    heuristic, epsilons = is_heuristic(ledger), _epsilons(ledger, digits=17)
    charged = [(entry, entry.charges[client]) for entry in ledger.entries if client in entry.charges]
    totals = _totals(ledger, np.array([_cost(charge) for _, charge in charged]))
    return [
        (
            entry.round,
            entry.attempt,
            charge.joint,
            None if heuristic or not math.isfinite(epsilon) else epsilon,
        )
        for (entry, charge), epsilon in zip(charged, epsilons(totals).tolist(), strict=True)
    ]


def format_claim(epsilon: float | None) -> str:
    return NOT_APPLICABLE if epsilon is None else rounded_up(epsilon)


def format_spent(amount: Amount) -> str:
    """mu with four digits, which is compared and added up, never claimed, so it is not rounded up; or a number."""
    if isinstance(amount, Slots):
        return str(amount.size)
    return digits(amount, 4) if math.isfinite(amount) else "∞"


def read_spending(report: ReportInput, notes: list[str]) -> list[Spending]:
    """What was spent by the clients of every private method, as far as that can be drawn.

    notes  a ledger whose chain does not verify is left out and named here
    """
    found = []
    for method in report.methods:
        try:
            ledger = read_ledger(method)
        except PrivacyError as error:
            notes.append(f"The ledger of {method.label} cannot be trusted and was left out: {error.message}")
            continue
        found.append(None if ledger is None else spending_of(method.label, ledger))
    return [one for one in found if one is not None]


def spending_of(label: str, ledger: LedgerFile) -> Spending | None:
    """What the clients of a ledger have spent; None where nothing was charged, or the charges prove nothing."""
    clients = ledger.clients
    drawn = clients if len(clients) <= MOST_LINES else ledger.charged
    rounds, spent = _spent(ledger, drawn)
    if is_heuristic(ledger) or not rounds or not np.all(np.isfinite(spent)):
        return None
    places = evenly_spaced(range(len(rounds) + 1), MOST_ROUNDS)
    spent, epsilon = spent[:, places], _epsilons(ledger)
    budgets, never = ledger.header.promised, len(clients) - len(drawn)
    return Spending(
        label=label,
        delta=ledger.header.delta,
        rounds=tuple([0, *rounds][place] for place in places),
        least=epsilon(np.zeros(len(places)) if never else spent.min(axis=0)),
        median=epsilon(np.array([np.median(np.pad(one, (never, 0))) for one in spent.T])),
        most=epsilon(spent.max(axis=0)),
        lines=tuple(map(epsilon, spent)) if len(clients) <= MOST_LINES else (),
        budget=ledger.epsilon(max(budgets, key=_size)) if budgets else None,
    )


def worst_spent(method: MethodResult) -> dict[int, float]:
    """Epsilon that the worst-off client has spent in the joint view after each round; finite ones alone.

    Empty where nothing is guaranteed: no ledger, one that cannot be trusted, or one that rests on a heuristic.
    """
    ledger = None
    with suppress(PrivacyError):
        ledger = read_ledger(method)
    if ledger is None or not ledger.entries or is_heuristic(ledger):
        return {}
    rounds, spent = _spent(ledger, ledger.charged)
    most = spent.max(axis=0)[1:]
    epsilons = _epsilons(ledger)(most[np.isfinite(most)])
    # Infinite totals come last: what is spent never shrinks.
    return {
        number: float(value) for number, value in zip(rounds, epsilons, strict=False) if math.isfinite(value)
    }


def _spent(ledger: LedgerFile, drawn: Sequence[str]) -> tuple[list[int], FloatArray]:
    """The rounds, and the total (`_totals`) of these clients before the first and after each of them.

    They include all that were charged.
    """
    clients = {client: place for place, client in enumerate(drawn)}
    rounds = sorted({entry.round for entry in ledger.entries})
    columns = {number: place for place, number in enumerate(rounds, start=1)}
    squares = np.zeros((len(clients), len(rounds) + 1))
    for entry in ledger.entries:
        for client, charge in entry.charges.items():
            squares[clients[client], columns[entry.round]] += _cost(charge)
    return rounds, _totals(ledger, squares)


def _cost(charge: Charge) -> float:
    """What is added up of a charge: mu^2, or one slot."""
    return float(charge.mu2) if charge.slot is None else 1.0


def _totals(ledger: LedgerFile, costs: FloatArray) -> FloatArray:
    """What costs come to one after the other: mu, `sqrt(sum mu^2)`, or how many slots."""
    sums = np.cumsum(costs, axis=-1)
    return sums if ledger.header.unit == "record" else np.sqrt(sums)


def _epsilons(ledger: LedgerFile, digits: int = 9) -> Callable[[FloatArray], FloatArray]:
    """Epsilon of each total in an array, infinite where there is none; totals that differ by rounding share one.

    So many slots are counted as if all were the worst, which they are where all are alike, and beyond some dozens
    rounded up to the next of as many steps.
    """
    taken = [slots for slots in map(ledger.spent, ledger.charged) if isinstance(slots, Slots)]
    kinds = [(q, z) for slots in taken for q, z, _ in slots.rounds]
    most = max((slots.size for slots in taken), default=0)
    steps = np.unique(np.ceil(np.linspace(0, most, _STEPS + 1)).astype(np.int64))

    @cache
    def one(total: float) -> float:
        amount: Amount = total
        if kinds:
            count = int(steps[np.searchsorted(steps, total)])
            amount = Slots.of((max(q for q, _ in kinds), min(z for _, z in kinds), count))
        epsilon = ledger.epsilon(amount) if total else 0.0
        return math.inf if epsilon is None else epsilon

    return lambda totals: np.array([one(float(f"{total:.{digits}g}")) for total in totals])


def node_limits(ledger: LedgerFile) -> list[Limit]:
    """What holds for all runs of a node; nothing for the ledger of anything else."""
    header = ledger.header
    owner = find_json(ledger.path.parent / LIMITS)
    if owner is None or ledger.clients != ("self",):
        return []
    limits, budget = [], ledger.budget("self")
    if budget is not None:
        limits.append(Limit.of_ledger(budget, header.delta, header.delta_failure))
    if owner:
        failing = sum(entry.charges["self"].grid_delta or 0.0 for entry in ledger.entries)
        setting, epsilon, delta = (owner[name] for name in ("setting", "epsilon", "delta"))
        limits.append(Limit.of_owner(setting, epsilon, delta, failing + float(owner["failures"])))
    return limits
