"""What Google's dp-accounting computes for us: the outsider's claim, and a client's ledger as its events.

An outsider sees the released models and nothing else. He knows neither who took part nor any fellow client's secrets,
so the noise of the whole aggregate stands between him and a client, `z_t = sqrt(aggregate variance of round t) /
(p_k clip)`, and where participants are drawn in secret, sampling amplifies. The amplified numbers are dp-accounting's:

poisson    each client joins with probability participants / clients on its own: PLD accountant,
           ADD_OR_REMOVE_ONE. Needs weights p_k that do not depend on who else joined.
uniform    a fixed number of clients, without replacement: RDP accountant, REPLACE_ONE. Two fixed-size sets
           differ in one client against another, so the sensitivity is 2 p_k clip. dp-accounting's RDP
           accountant does not double it (its PLD accountant does, for the same relation): a Gaussian of
           noise multiplier z enters as z / 2. Its bound is loose; plain composition counts where it is better.
shuffled   clients are dealt out in cohorts: no amplification is claimed, the client's rounds just compose.

The server, a fellow client or anyone who learns the participants is no outsider: for them the joint view holds.

`to_dp_event` writes down the rounds of one client for an accountant of dp-accounting, so that others can check our
sums.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from niss.errors import ConfigError
from niss.mechanism import gdp_epsilon

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from niss.accounting.ledger_file import LedgerFile

SAMPLINGS = ("poisson", "uniform", "shuffled")

# More different rounds than this are rounded down onto a grid, so that the accountants work on few of them.
_FEW = 8
_GRID = math.log(1.005)
# Above this privacy loss (mu^2 / 2) sampling is worth next to nothing, and its distribution is too wide to compute.
_WIDEST_LOSS = 1e4


@dataclass(frozen=True)
class OutsiderClaim:
    """(epsilon, delta)-DP of one client against an outsider; epsilon is None where there is no guarantee.

    `relation` is the one the number holds for, `accountant` what computed it.
    """

    epsilon: float | None
    delta: float
    relation: str
    accountant: str
    words: str


def noise_multiplier(variance: float, contribution: float) -> float:
    """z_t: the deviation of the noise in a released sum over `p_k clip`, the most one client puts into it."""
    return math.sqrt(variance) / contribution if contribution else 0.0


def outsider_epsilon(
    *,
    noise_multipliers: Sequence[float],
    sampling: str,
    clients: int,
    participants: int,
    delta: float,
    participations: int | None = None,
) -> OutsiderClaim:
    """What the released models reveal of one client.

    noise_multipliers  one per round of the run, see `noise_multiplier`
    sampling           how participants are drawn, see above
    clients            how many there are
    participants       how many of them take part in a round (poisson: on average)
    delta              of the claim
    participations     caps how often one client takes part. A cap that may bind makes the sampling depend on the
                       past; then nothing is amplified, and the claim composes the worst `participations` rounds.
    """
    _check(noise_multipliers, sampling, clients, participants, delta, participations)
    multipliers = sorted(float(z) for z in noise_multipliers)
    capped = participations is not None and participations < len(multipliers)
    if capped:
        multipliers = multipliers[:participations]
    if multipliers and multipliers[0] == 0.0:
        return _claim(math.inf, delta, "zero-out", "none", "a round's aggregate carries no noise at all")
    if sampling == "shuffled":
        return _plain(multipliers, delta, "zero-out", "cohorts dealt out in turn are not credited")
    if capped:
        why = "the cap on participations makes the draws depend on the past, so they are not credited"
        return _plain(multipliers, delta, "zero-out", why)
    # Sampling never hurts, so plain composition may stand in where the accountant cannot be used or is loose.
    lost = "sampling is worth nothing at this noise"
    too_wide = _loss(multipliers) > _WIDEST_LOSS
    if sampling == "poisson":
        if too_wide:
            return _plain(multipliers, delta, "zero-out", lost)
        return _poisson(multipliers, participants / clients, delta)
    plain = _plain([z / 2.0 for z in multipliers], delta, "replace-one", lost)
    if too_wide or plain.epsilon is None:
        return plain
    amplified = _without_replacement(multipliers, clients, participants, delta)
    return plain if amplified.epsilon is None or plain.epsilon < amplified.epsilon else amplified


def _plain(multipliers: Sequence[float], delta: float, relation: str, why: str) -> OutsiderClaim:
    epsilon = gdp_epsilon(math.sqrt(2.0 * _loss(multipliers)), delta)
    words = f"plain composition over {len(multipliers)} participations; {why}"
    return _claim(epsilon, delta, relation, "GDP (exact)", words)


def _poisson(multipliers: Sequence[float], probability: float, delta: float) -> OutsiderClaim:
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    # dp-accounting's own interval, made coarser as the losses grow wide: about 1e5 steps at all times.
    interval = min(max(1e-4, 1e-5 * _loss(multipliers)), 1e-2)
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, interval)
    for z, count in _grouped(multipliers):
        event = dp_accounting.PoissonSampledDpEvent(probability, dp_accounting.GaussianDpEvent(z))
        accountant.compose(event, count)
    epsilon = float(accountant.get_epsilon(delta))
    words = f"Poisson sampling with probability {probability:g}, unseen by the outsider, over {len(multipliers)} rounds"
    return _claim(epsilon, delta, "add-or-remove-one", "PLD (dp-accounting)", words)


def _without_replacement(
    multipliers: Sequence[float], clients: int, participants: int, delta: float
) -> OutsiderClaim:
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    for z, count in _grouped(multipliers):
        # Half the multiplier is twice the sensitivity: this accountant takes it for that of a replacement.
        event = dp_accounting.SampledWithoutReplacementDpEvent(
            clients, participants, dp_accounting.GaussianDpEvent(z / 2.0)
        )
        accountant.compose(event, count)
    epsilon = float(accountant.get_epsilon(delta)) if multipliers else 0.0
    drawn = f"{participants} of {clients} clients drawn each round, unseen by the outsider"
    return _claim(
        epsilon, delta, "replace-one", "RDP (dp-accounting)", f"{drawn}, over {len(multipliers)} rounds"
    )


def _claim(epsilon: float, delta: float, relation: str, accountant: str, words: str) -> OutsiderClaim:
    known = epsilon if math.isfinite(epsilon) else None
    claim = "No guarantee" if known is None else f"({rounded_up(known)}, {delta:g})-DP"
    return OutsiderClaim(
        known,
        delta,
        relation,
        accountant,
        f"{claim} ({relation}) against an outsider who sees only the released models: {words}. "
        "Whoever knows the participants is no outsider.",
    )


def rounded_up(epsilon: float) -> str:
    """Two digits, never below the number itself (a rounding error of 1e-8 apart)."""
    return f"{math.ceil(epsilon * 100.0 - 1e-6) / 100.0:.2f}"


def _loss(multipliers: Sequence[float]) -> float:
    """mu^2 / 2 of all rounds without amplification."""
    return 0.5 * math.fsum((1.0 / z) * (1.0 / z) for z in multipliers)


def _grouped(multipliers: Sequence[float]) -> list[tuple[float, int]]:
    """Equal rounds counted; many different ones are rounded down by at most 0.5 %, the safe side."""
    counts = Counter(multipliers)
    if len(counts) > _FEW:
        counts = Counter(min(z, math.exp(_GRID * math.floor(math.log(z) / _GRID))) for z in multipliers)
    return sorted(counts.items())


def _check(
    noise_multipliers: Sequence[float],
    sampling: str,
    clients: int,
    participants: int,
    delta: float,
    participations: int | None,
) -> None:
    if sampling not in SAMPLINGS:
        raise ConfigError(
            f"unknown value {sampling!r}", field="sampling", hint="use one of: " + ", ".join(SAMPLINGS)
        )
    for z in noise_multipliers:
        if not (math.isfinite(z) and z >= 0.0):
            raise ConfigError(f"must be finite and not negative, not {z!r}", field="noise_multipliers")
    if not 1 <= participants <= clients:
        raise ConfigError(
            f"must lie between 1 and the {clients} clients, not {participants}", field="participants"
        )
    if participations is not None and participations < 0:
        raise ConfigError(f"must not be negative, not {participations}", field="participations")
    if not 0.0 < delta < 1.0:
        raise ConfigError(f"must lie strictly between 0 and 1, not {delta!r}", field="delta")


def to_dp_event(mus: Iterable[float | None]) -> DpEvent:
    """All rounds of one client as a `ComposedDpEvent`: `GaussianDpEvent(1 / mu)` for each.

    Equal rounds are one `SelfComposedDpEvent`; composition does not mind the order. Infinite mu, or None,
    is a `NonPrivateDpEvent`; a mu of 0 reveals nothing and is left out. Give it to an accountant with its
    default relation: the sensitivity is already in mu, and REPLACE_ONE would double it in a PLDAccountant.
    """
    import dp_accounting

    counts = Counter(_checked(mu) for mu in mus)
    events = []
    for mu, count in counts.items():
        if mu == 0.0:
            continue
        event = (
            dp_accounting.NonPrivateDpEvent()
            if math.isinf(mu)
            else dp_accounting.GaussianDpEvent(noise_multiplier=1.0 / mu)
        )
        events.append(event if count == 1 else dp_accounting.SelfComposedDpEvent(event, count))
    return dp_accounting.ComposedDpEvent(events)


def dp_accounting_epsilon(mus: Iterable[float | None], delta: float) -> float | None:
    """Epsilon of these rounds by dp-accounting's PLD accountant; None: no guarantee.

    For checking: `gdp_epsilon(sqrt(sum of mu^2), delta)` is exact and quicker.
    """
    from dp_accounting.pld import PLDAccountant

    if not 0.0 < delta < 1.0:
        raise ConfigError(f"must lie strictly between 0 and 1, not {delta!r}", field="delta")
    accountant = PLDAccountant()
    accountant.compose(to_dp_event(mus))
    epsilon = float(accountant.get_epsilon(delta))
    return epsilon if math.isfinite(epsilon) else None


def client_dp_event(ledger: LedgerFile, client: str) -> DpEvent:
    """The joint-view charges of one client of a ledger, for an accountant of your choice."""
    ledger.budget(client)  # Refuses a client the ledger does not know.
    return to_dp_event(entry.mus[client].joint for entry in ledger.entries if client in entry.mus)


def _checked(mu: float | None) -> float:
    value = math.inf if mu is None else float(mu)
    if not value >= 0.0:
        raise ConfigError(f"must be a number of at least 0, not {mu!r}", field="mus")
    return value
