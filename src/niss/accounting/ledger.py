"""What each client has spent, over rounds, and the budget that may not be overspent: the ledger in memory.

Gaussian mechanisms compose exactly: `mu_total^2` is the sum of `mu_t^2` over the rounds a client took
part in. With a budget B fixed in advance the ledger is a privacy filter: a round that would push the
total past B is refused before anything is sent, and B is the claim. The running total is only "spent".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from niss.checks import BOOKS
from niss.errors import ConfigError, PrivacyError

FloatArray = NDArray[np.float64]


class ChargeableLedger(Protocol):
    """Where one upload of each named client is charged, as (joint, marginal) mu; see `LedgerFile.charge`."""

    def charge(
        self, round: int, attempt: int, mus: Mapping[str, tuple[float, float]], basis: Mapping[str, Any]
    ) -> object:
        """Charge before anything is sent, or raise PrivacyError."""


@dataclass
class Ledger:
    """Spent privacy of every client: squared mu in the joint and the marginal view, and rounds taken part in.

    `budget` holds one B_k per client, or None where nothing was promised in advance. `history` holds the participants
    of every round charged, in order.
    """

    joint_squared: FloatArray
    marginal_squared: FloatArray
    participations: NDArray[np.int64]
    budget: FloatArray | None = None
    history: list[NDArray[np.int64]] = field(default_factory=list, kw_only=True)

    @classmethod
    def empty(cls, clients: int, budget: FloatArray | None = None) -> Ledger:
        """A ledger of that many clients, numbered from 0, before the first round."""
        return cls(np.zeros(clients), np.zeros(clients), np.zeros(clients, dtype=np.int64), budget)

    def room(self, clients: NDArray[np.int64], mu: FloatArray) -> NDArray[np.bool_]:
        """Whether the budget of each of these clients allows one more round at its `mu`."""
        if self.budget is None:
            return np.ones(clients.size, dtype=bool)
        total = self.joint_squared[clients] + mu**2
        return np.asarray(total <= self.budget[clients] ** 2 * (1.0 + BOOKS))

    def charge(
        self,
        participants: NDArray[np.int64],
        joint_mu: FloatArray,
        marginal_mu: FloatArray,
        attempt: int = 0,  # noqa: ARG002
    ) -> None:
        """Charge a round before it is sent; refuse it whole if any participant would overspend.

        participants           by number, each once
        joint_mu, marginal_mu  what the round costs each of them, in the two views
        attempt                which attempt at the round is played, for those who write it down
        """
        if np.unique(participants).size != participants.size:
            raise ConfigError("a client takes part in a round once", field="participants")
        overspending = participants[~self.room(participants, joint_mu)]
        if overspending.size:
            raise PrivacyError(
                f"client {overspending[0]} would overspend its privacy budget",
                hint="fewer rounds, a larger epsilon, or a higher cap on participations",
            )
        self.joint_squared[participants] += joint_mu**2
        self.marginal_squared[participants] += marginal_mu**2
        self.participations[participants] += 1
        self.history.append(participants)
