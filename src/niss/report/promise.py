"""What a run promised, for whoever answers for privacy: how much, against whom, and how it can be checked.

Everything comes from the files of the run: privacy.json (the statement) and ledger.jsonl (what was charged, whose hash
chain is verified here). The page and `niss run` print the same sentences.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from niss.claims import odds_in_words, rounded_up
from niss.errors import PrivacyError, RunFolderError
from niss.files import LEDGER, PRIVACY, JsonObject
from niss.report.run_folder import MethodResult, number_at, read_object, read_report_input, text_at

_DELTA = 1e-5


@dataclass(frozen=True, slots=True)
class Promise:
    """The promise of one method in sentences; None where there is nothing to say.

    words     the guarantee, or that there is none
    odds      what epsilon means to an attacker who has to guess
    trust     who has to be trusted for it, and who does not
    budget    what was fixed in advance, and how much of it is spent
    verified  what the ledger shows, checked just now
    check     how to check it again
    caveats   what a reader has to know besides
    """

    label: str
    words: str
    odds: str | None
    trust: str | None
    budget: str | None
    verified: str | None
    check: str | None
    caveats: tuple[str, ...]


def read_promise(folder: Path) -> Promise | None:
    """The promise of the run in `folder`; None for a comparison."""
    report = read_report_input(folder)
    return None if report.is_comparison else promise_of(report.methods[0])


def promise_of(method: MethodResult) -> Promise | None:
    """The promise of a finished method; None while it is unfinished, or where its statement is missing."""
    words = method.guarantee
    if words is None or not method.finished:
        return None
    statement: JsonObject = {}
    with suppress(RunFolderError):
        statement = read_object(method.folder / PRIVACY) or {}
    spent = _verified_ledger(method)
    caveats = statement.get("caveats")
    return Promise(
        label=method.label,
        words=words,
        odds=_odds(method, statement),
        trust=_trust(method),
        budget=_budget(method, statement),
        verified=spent,
        check=f"niss account {method.folder}" if spent else None,
        caveats=tuple(one for one in caveats if isinstance(one, str)) if isinstance(caveats, list) else (),
    )


def _odds(method: MethodResult, statement: JsonObject) -> str | None:
    """The bound on a guess; closer where every client's charges are Gaussian and their mu is on record."""
    if method.epsilon_joint is None:
        return None
    where = method.folder / PRIVACY
    delta = number_at(statement, "delta", where)
    return odds_in_words(
        method.epsilon_joint,
        _DELTA if delta is None else delta,
        mu=_worst_mu(statement),
        unit=text_at(statement, "unit", where) or "client",
        relation=text_at(statement, "relation", where) or "zero-out",
    )


def _worst_mu(statement: JsonObject) -> float | None:
    """The largest mu of the joint view among those who took part; None where one of them has none."""
    clients = statement.get("clients")
    if not isinstance(clients, list):
        return None
    mus = [one.get("mu_joint") for one in clients if isinstance(one, dict) and one.get("participations")]
    known = [float(mu) for mu in mus if isinstance(mu, int | float) and math.isfinite(mu)]
    return max(known) if known and len(known) == len(mus) else None


def _trust(method: MethodResult) -> str | None:
    """Who is trusted, in a sentence; the adversary of the statement says the rest."""
    if not method.is_private:
        return "Everyone who handles the updates is trusted: they are sent as they are."
    if method.epsilon_joint is None:
        return None
    if method.trusts_the_server:
        return "The server is trusted: it sees every update without noise."
    return "The server is not trusted; the promise holds against it."


def _budget(method: MethodResult, statement: JsonObject) -> str | None:
    budget = number_at(statement, "budget_epsilon", method.folder / PRIVACY)
    if budget is None or method.epsilon_joint is None:
        return None
    return (
        f"at most epsilon {rounded_up(budget)} was promised in advance; the worst-off client has spent "
        f"{rounded_up(method.epsilon_joint)}."
    )


def _verified_ledger(method: MethodResult) -> str | None:
    """That the ledger is whole, once its hash chain has been recomputed; None where there is none."""
    from niss.report.ledger import read_ledger

    try:
        ledger = read_ledger(method)
    except PrivacyError as error:
        return f"The ledger does not verify: {error.message}"
    if ledger is None:
        return None
    return (
        f"{len(ledger.entries)} rounds were charged in {LEDGER}, no client more than its budget, and the hash chain "
        f"over all of them is unbroken (it ends in {ledger.head[:12]})."
    )
