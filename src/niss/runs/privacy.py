"""What a run promised, for whoever answers for privacy: how much, against whom, and how it can be checked.

Everything comes from the files of the run: privacy.json (the statement) and ledger.jsonl (what was charged, whose hash
chain is verified here). The page and `niss run` print the same sentences.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from niss.claims import NO_GUARANTEE, NOT_APPLICABLE, digits, odds_in_words, rounded_up
from niss.errors import PrivacyError, RunFolderError
from niss.files import LEDGER, PRIVACY, JsonObject
from niss.runs.folder import MethodResult, find_number, read_object, read_report_input, section

if TYPE_CHECKING:
    from niss.accounting import LedgerFile

NOT_PRIVATE = "not private"
UNFINISHED = "unfinished"
_HIDDEN = {"unit": "client", "relation": "zero-out"}


def read_ledger(method: MethodResult) -> LedgerFile | None:
    """The ledger of a private method, None where there is none; raises `PrivacyError` where its chain is broken."""
    from niss.accounting import LedgerFile

    path = method.folder / LEDGER
    return LedgerFile.read(path) if method.is_private and path.is_file() else None


def format_epsilon(method: MethodResult, epsilon: float | None) -> str:
    """An epsilon against the server; a missing one means: nothing to protect with, nothing proven, or not known yet."""
    if not method.is_private:
        return NOT_PRIVATE
    if not method.finished:
        return UNFINISHED
    return NO_GUARANTEE if epsilon is None or method.trusts_the_server else rounded_up(epsilon)


def who_is_trusted(method: MethodResult) -> str:
    """Whom the promise of a method has to trust; for one that trusts the server, what it promises against others."""
    known = method.registered
    if known is None or (method.is_private and method.finished and method.epsilon_joint is None):
        return NOT_APPLICABLE
    privacy = section(method.manifest, "config", "privacy")
    share, clients = (
        privacy.get("collusion") or 0.0,
        "silos" if privacy.get("unit") == "record" else "clients",
    )
    honest = (
        f"{100 * (1 - share):.3g} % of the {clients}"
        if isinstance(share, float) and share
        else f"all {clients}"
    )
    words = known.trusts.format(clients=honest)
    if method.trusts_the_server and method.epsilon_joint is not None:
        words += f" (ε {rounded_up(method.epsilon_joint)} against others)"
    return words


@dataclass(frozen=True, slots=True)
class PromiseInWords:
    """The promise of one method in sentences; None where there is nothing to say.

    amount    epsilon and delta alone, or that there is no guarantee
    words     the guarantee, or that there is none
    odds      what epsilon means to an attacker who has to guess
    trust     who has to be trusted for it, and who does not
    budget    what was fixed in advance, and how much of it is spent
    verified  what the ledger shows, checked just now
    caveats   what a reader has to know besides
    """

    label: str
    amount: str
    words: str
    odds: str | None
    trust: str | None
    budget: str | None
    verified: str | None
    caveats: tuple[str, ...]


def read_promise(folder: Path) -> PromiseInWords | None:
    """The promise of the run in `folder`; None for a comparison."""
    report = read_report_input(folder)
    return None if report.is_comparison else promise_of(report.methods[0])


def promise_of(method: MethodResult) -> PromiseInWords | None:
    """The promise of a finished method; None while it is unfinished, or where its statement is missing."""
    words = method.guarantee
    if words is None or not method.finished:
        return None
    statement: JsonObject = {}
    with suppress(RunFolderError):
        statement = read_object(method.folder / PRIVACY) or {}
    caveats = statement.get("caveats")
    return PromiseInWords(
        label=method.label,
        amount=_amount(method, statement),
        words=words,
        odds=_odds(method, statement),
        trust=_trust(method),
        budget=_budget(method, statement),
        verified=_verified_ledger(method),
        caveats=tuple(one for one in caveats if isinstance(one, str)) if isinstance(caveats, list) else (),
    )


def _amount(method: MethodResult, statement: JsonObject) -> str:
    """Epsilon and delta as the table prints them; in words where there is no number."""
    delta = find_number([statement], "delta")
    if method.epsilon_joint is None or not method.is_private:
        return format_epsilon(method, None).capitalize()
    return f"ε = {rounded_up(method.epsilon_joint)}" + ("" if delta is None else f", δ = {digits(delta)}")


def _odds(method: MethodResult, statement: JsonObject) -> str | None:
    """The bound on a guess; closer where charges are Gaussian and their mu is on record."""
    delta = find_number([statement], "delta")
    if method.epsilon_joint is None or delta is None:
        return None
    claim = (method.epsilon_joint, delta, find_number([statement], "mu_joint"))
    unit, relation = (str(statement.get(name) or usual) for name, usual in _HIDDEN.items())
    return odds_in_words(*claim, unit=unit, relation=relation)


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
    budget = find_number([statement], "budget_epsilon")
    # Where the claim is no sum of charges, budget and claim are about different observers.
    summed = statement.get("unit") == "record" or find_number([statement], "mu_joint") is not None
    if budget is None or method.epsilon_joint is None or not summed:
        return None
    return (
        f"At most ε = {rounded_up(budget)} was promised in advance; the worst-off client has spent "
        f"{rounded_up(method.epsilon_joint)}."
    )


def _verified_ledger(method: MethodResult) -> str | None:
    """That the ledger is whole, once its hash chain has been recomputed; None where there is none."""
    try:
        ledger = read_ledger(method)
    except PrivacyError as error:
        return f"The ledger does not verify: {error.message}"
    if ledger is None:
        return None
    within = ", no client more than its budget," if ledger.header.promised else ""
    return (
        f"{len(ledger.entries)} rounds were charged in {LEDGER}{within} and the hash chain over them is unbroken "
        f"(it ends in {ledger.head[:12]})."
    )
