"""The outsider's claim: someone who sees the released models and nothing else.

He knows neither who took part nor any fellow client's secrets, so the noise of the whole aggregate stands
between him and a client, `z_t = sqrt(aggregate variance of round t) / (p_k clip)`, and where participants
are drawn in secret, sampling amplifies. The amplified numbers are dp-accounting's:

poisson    each client joins with probability participants / clients on its own: PLD accountant,
           ADD_OR_REMOVE_ONE. Needs weights p_k that do not depend on who else joined.
uniform    a fixed number of clients, without replacement: RDP accountant, REPLACE_ONE. Two fixed-size sets
           differ in one client against another, so the sensitivity is 2 p_k clip. dp-accounting's RDP
           accountant does not double it (its PLD accountant does, for the same relation): a Gaussian of
           noise multiplier z enters as z / 2. Its bound is loose; plain composition counts where it is better.
shuffled   clients are dealt out in cohorts: no amplification is claimed, the client's rounds just compose.

The server, a fellow client or anyone who learns the participants is no outsider: for them the joint view holds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from niss.errors import ConfigError
from niss.mechanism import gdp_epsilon

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


def outsider_epsilon(
    *,
    noise_multipliers: Sequence[float],
    sampling: str,
    clients: int,
    participants: int,
    delta: float,
    participations: int | None = None,
) -> OutsiderClaim:
    """What the released models reveal of one client: one noise multiplier per round of the run.

    `participants` of `clients` take part in a round (poisson: on average). `participations` caps how often
    one client does. A cap that may bind makes the sampling depend on the past; then nothing is amplified,
    and the claim composes the worst `participations` rounds.
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
    said = (
        "No guarantee" if known is None else f"({math.ceil(known * 100.0 - 1e-6) / 100.0:.2f}, {delta:g})-DP"
    )
    return OutsiderClaim(
        known,
        delta,
        relation,
        accountant,
        f"{said} ({relation}) against an outsider who sees only the released models: {words}. "
        "Whoever knows the participants is no outsider.",
    )


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
