"""The claim against an outsider, with what Google's dp-accounting computes for it.

An outsider sees the released models and nothing else. The noise of the whole sum stands between him and a client:
neighbouring inputs of the plan's unit and relation move the sum of round t by at most `Delta` (`Plan.sensitivity`), so
a round in which the client takes part is mu_t-GDP, `mu_t = Delta / sqrt(variance of the sum's noise)`, and plain
composition over the client's rounds holds in every relation. The claim is made in the relation of the statement and in
no other. Participants drawn in secret may make it smaller, where that is proved for this very relation:

poisson    each client joins with probability q = participants / clients on its own; p_k does not depend on who joins.
           zero-out: whoever else joined, the client's update is in the sum with probability q, or a zero is, which
           leaves the sum as it was: `(1 - q) N(s, .) + q N(s + p_k x_k, .)` against `N(s, .)`. That is the pair of an
           added or removed client, and dp-accounting's PLD accountant composes it (`Slots`; dominating pairs
           compose adaptively: Zhu, Dong, Wang 2022, theorem 10).
           replace-one: no accountant proves a pair for it; plain composition.
uniform    a fixed number of clients, without replacement. Where the client was not drawn another was in its place, so
           the sum differs by up to 2 p_k clip, also for zero-out. dp-accounting's RDP accountant (Wang, Balle,
           Kasiviswanathan 2019) bounds replace-one; its Gaussian is given that doubled sensitivity, since it does not
           double by itself (the PLD accountant does). An update of zero is one of the replacements, so the bound
           holds for zero-out too. It is loose: plain composition, at the relation's own Delta, counts where it is less.
shuffled   clients are dealt out in cohorts: no amplification is claimed.

In the record unit an outsider gets what the joint view promises for a secret batch, with the noise of the whole sum:
every round is the pair above with the record for the client and `q = batch`, whoever takes part. Drawing whole silos
adds nothing to it.

Nothing is amplified for clients that differ in weight or noise, where the noise of a sum depends on who is in it.

The server, a fellow client or anyone who learns the participants is no outsider: for them the joint view holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from niss.checks import require_one_of, require_real, require_whole
from niss.claims import digits, rounded_up
from niss.errors import ConfigError
from niss.mechanism import Slots, gdp_epsilon
from niss.mechanism.slots import WIDEST_LOSS, few_kinds

SAMPLINGS = ("poisson", "uniform", "shuffled")
# How many times as far as its own neighbours any two updates of the client unit may lie apart.
_ANY_TWO = {"zero-out": 2.0, "replace-one": 1.0}
_RELATIONS = {"client": tuple(_ANY_TWO), "record": ("zero-out",)}


@dataclass(frozen=True)
class OutsiderClaim:
    """(epsilon, delta)-DP of one client against an outsider; epsilon is None where there is no guarantee.

    `unit` and `relation` say what the number is about, `accountant` what computed it.
    """

    epsilon: float | None
    delta: float
    unit: str
    relation: str
    accountant: str
    words: str


def outsider_epsilon(
    *,
    mus: Sequence[float],
    unit: str,
    relation: str,
    sampling: str,
    clients: int,
    participants: int,
    delta: float,
    participations: int | None = None,
    alike: bool = True,
    batch: float | None = None,
) -> OutsiderClaim:
    """What the released models reveal of one client, in this unit and relation.

    mus             one per round of the run: the most that neighbours of this relation move the sum, over the
                    deviation of its noise; infinite where there is no noise
    unit, relation  what is hidden, as in `Plan`
    sampling        how participants are drawn, see above
    clients         how many there are
    participants    how many of them take part in a round (poisson: on average)
    delta           of the claim
    participations  caps how often one client takes part. A cap that may bind makes the sampling depend on the
                    past; then nothing is amplified, and the claim composes the worst `participations` rounds.
    alike           whether all clients have the same weight and add the same noise
    batch           in the record unit, the probability with which a record is in a round's secret batch
    """
    require_one_of(sampling, SAMPLINGS, field="sampling")
    require_one_of(unit, _RELATIONS, field="unit")
    require_one_of(relation, _RELATIONS[unit], field="relation")
    require_real(delta, field="delta", below=1.0, zero_allowed=False)
    if (unit == "record") != (batch is not None):
        raise ConfigError("goes with the record unit, and with it alone", field="batch")
    if not 1 <= participants <= clients:
        raise ConfigError(
            f"must lie between 1 and the {clients} clients, not {participants}", field="participants"
        )
    if participations is not None:
        require_whole(participations, field="participations", at_least=0)
    if wrong := [mu for mu in mus if not mu >= 0.0]:
        raise ConfigError(f"must be a number of at least 0, not {wrong[0]!r}", field="mus")
    costs = sorted((mu for mu in mus if mu > 0.0), reverse=True)
    capped = participations is not None and participations < len(mus)
    if capped:
        costs = costs[:participations]

    def claim(epsilon: float, accountant: str, words: str) -> OutsiderClaim:
        known = epsilon if math.isfinite(epsilon) else None
        hidden = relation if unit == "client" else f"one {unit}, {relation}"
        promise = "No guarantee" if known is None else f"({rounded_up(known)}, {digits(delta)})-DP"
        words = f"{promise} ({hidden}) against an outsider who sees only the released models: {words}. "
        secret = "the participants" if batch is None else "a batch"
        words += f"Whoever knows {secret} is no outsider."
        return OutsiderClaim(known, delta, unit, relation, accountant, words)

    if costs and math.isinf(costs[0]):
        return claim(math.inf, "none", "a round's aggregate carries no noise at all")
    if batch is not None:
        drawn = f"secret batches with probability {batch:g} a record, over {len(costs)} rounds"
        return claim(_poisson(costs, batch).epsilon(delta), "PLD (dp-accounting)", drawn)
    loss = 0.5 * math.fsum(mu * mu for mu in costs)
    why = "sampling is worth nothing at this noise"
    if sampling == "shuffled":
        why = "cohorts dealt out in turn are not credited"
    elif capped:
        why = "the cap on participations makes the draws depend on the past, so they are not credited"
    elif not alike:
        why = "clients differ in weight or noise, so the draws are not credited"
    elif sampling == "poisson" and relation != "zero-out":
        why = "for replaced updates no amplification by Poisson sampling is proved"
    elif 0.0 < loss <= WIDEST_LOSS:
        plain = gdp_epsilon(math.sqrt(2.0 * loss), delta)
        if sampling == "poisson":
            probability = participants / clients
            amplified, accountant = _poisson(costs, probability).epsilon(delta), "PLD (dp-accounting)"
            drawn = f"Poisson sampling with probability {probability:g}"
        else:
            replaced = [_ANY_TWO[relation] * mu for mu in costs]
            amplified = _without_replacement(replaced, clients, participants, delta)
            accountant = "RDP (dp-accounting)"
            drawn = f"{participants} of {clients} clients drawn each round"
        if amplified < plain:
            return claim(amplified, accountant, f"{drawn}, unseen by the outsider, over {len(costs)} rounds")
    epsilon = gdp_epsilon(math.sqrt(2.0 * loss), delta) if loss else 0.0
    return claim(epsilon, "GDP (exact)", f"plain composition over {len(costs)} participations; {why}")


def _poisson(mus: Sequence[float], probability: float) -> Slots:
    return Slots.of(*((probability, 1.0 / mu, 1) for mu in mus))


def _without_replacement(mus: Sequence[float], clients: int, participants: int, delta: float) -> float:
    """Of updates that are replaced by any other; `mus` are those of a whole replacement."""
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    for _, z, count in few_kinds(_poisson(mus, 1.0).rounds):
        gaussian = dp_accounting.GaussianDpEvent(z)
        accountant.compose(
            dp_accounting.SampledWithoutReplacementDpEvent(clients, participants, gaussian), count
        )
    return float(accountant.get_epsilon(delta))
