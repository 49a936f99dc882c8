"""What a client keeps between requests: its identity, the protocol's memory, what it agreed to, what it spent.

A `Store` is where: in memory (`MemoryStore`, and Flower's Context), or in a folder of the node.

**Runs are paid for when they are joined.** A server that sees a graph before it shows it could show only those on
which a client's bound on colluders fails. So the probability that it fails on any graph of a run's whole chain is
added up over all runs that were joined, shown or not, and stays within the part of delta that is set aside for it.
"""

from __future__ import annotations

import base64
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from niss.accounting import ChargeableLedger, Ledger
from niss.accounting.node_limits import Limit, require_within
from niss.checks import LIMITS
from niss.errors import LocalProtocolError, PrivacyError
from niss.protocol import Entropy, Identity, SecretBytes
from niss.session.limits import Budget, Ceiling

SELF = "self"
"""The name of the client in its own ledger."""
_MOST_RUNS = 64
MOST_FAILING_RUNS = 1_000
"""Most runs that one identity joins whose bounds on colluders may fail."""
# What sums of a few thousand charges may differ by from the exact value.


@dataclass
class ClientState:
    """What a client remembers of its runs, which are named by their id in hex.

    memory     of the protocol's machine, with its one-time keys: secret
    proposals  the proposal agreed to, as the server signed it
    steps      how many requests were answered
    saves      how often this was written
    ledger     head of the ledger after the last charge; None before the first
    failures   with what probability any bound on colluders of a run that was joined may fail, at most
    failing    how many runs that is for
    first_keys number of the first prekey that was made for the run
    """

    memory: bytes | None = None
    proposals: dict[str, bytes] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    saves: int = 0
    ledger: str | None = None
    failures: float = 0.0
    failing: int = 0
    first_keys: dict[str, int] = field(default_factory=dict)

    def join(self, run: str, proposal: bytes, *, failure: float = 0.0, first_key: int = 0) -> bytes:
        """The proposal that was agreed to for a run: this one, unless it was joined before.

        run        id of the run, in hex
        proposal   as the server signed it
        failure    with what probability a bound on colluders of any graph of the run may fail
        first_key  number of the next prekey to be made: the run takes none from before

        Of many runs those joined first are forgotten, so that nobody fills the disk with them; a run that was
        forgotten counts as never joined, and its rounds stay answered in the protocol's memory.
        """
        if run not in self.proposals:
            self.proposals[run], self.first_keys[run] = proposal, first_key
            self.failures, self.failing = self.failures + failure, self.failing + (failure > 0.0)
        for oldest in list(self.proposals)[:-_MOST_RUNS]:
            del self.proposals[oldest]
            self.steps.pop(oldest, None)
            self.first_keys.pop(oldest, None)
        return self.proposals[run]

    def to_bytes(self) -> SecretBytes:
        """The state as it is kept: JSON, with bytes in base64, and runs in the order in which they were joined."""
        values = {
            "failing": self.failing,
            "failures": self.failures,
            "first_keys": self.first_keys,
            "ledger": self.ledger,
            "memory": None if self.memory is None else base64.b64encode(self.memory).decode(),
            "proposals": {run: base64.b64encode(data).decode() for run, data in self.proposals.items()},
            "saves": self.saves,
            "steps": self.steps,
            "version": 1,
        }
        return SecretBytes(json.dumps(values).encode())

    @classmethod
    def from_bytes(cls, data: bytes) -> ClientState:
        """The state in `data`; raises `LocalProtocolError`, without showing any of it, if it is damaged."""
        data = SecretBytes(data)  # Not left for a traceback to show.
        state = cls._parse(data)
        if state is None:
            # Raised here, where no traceback finds the keys among the locals.
            raise LocalProtocolError(
                "this client's saved state is damaged, or another niss wrote it",
                hint="go on with the niss that wrote it; without its memory a client could answer a round twice",
            )
        return state

    @classmethod
    def _parse(cls, data: SecretBytes) -> ClientState | None:
        try:
            values = json.loads(data)
            if values["version"] != 1:
                return None
            return cls(
                None if values["memory"] is None else SecretBytes(base64.b64decode(values["memory"])),
                {str(run): base64.b64decode(text) for run, text in values["proposals"].items()},
                {str(run): int(step) for run, step in values["steps"].items()},
                int(values["saves"]),
                None if values["ledger"] is None else str(values["ledger"]),
                float(values["failures"]),
                int(values["failing"]),
                {str(run): int(number) for run, number in values["first_keys"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            return None


class Store(ABC):
    """Where a client keeps its identity, its state and its ledger."""

    identity: Identity
    state: ClientState

    @abstractmethod
    def save(self) -> None:
        """Keep `state`; durable when this returns, as far as the place allows."""

    @abstractmethod
    def spent(self, budget: Budget) -> tuple[float, float, Budget]:
        """All that was charged: mu^2 of the joint view, failure probabilities, and the budget that was fixed for them.

        budget  what may be spent in all, where no earlier run has fixed it
        """

    @abstractmethod
    def ledger(
        self, run: str, relation: str, budget: Budget, ceiling: Ceiling | None = None
    ) -> ChargeableLedger:
        """The ledger that the rounds of a run are charged to.

        run       id of the run, in hex
        relation  what the run hides, `zero-out` or `replace-one`
        budget    what may be spent in all, where no earlier run has fixed it
        ceiling   what may be spent in all, even if an earlier run fixed more
        """

    def join(
        self,
        run: str,
        proposal: bytes,
        *,
        failure: float,
        first_key: int,
        budget: Budget,
        ceiling: Ceiling | None,
        mu: float = 0.0,
    ) -> bytes:
        """`ClientState.join`, for a run that there is room for; kept with the next `save`.

        mu  what one round of it costs, at most

        Raises `PrivacyError` where the budget does not cover another round, so that nobody waits for this client, and
        where the bounds on colluders of all runs together could fail too often.
        """
        joint_squared, failures, first = self.spent(budget)
        if math.isfinite(mu):
            require_within(_limits(first, ceiling, failures), joint_squared + mu**2)
        if run not in self.state.proposals and failure > 0.0:
            if self.state.failing >= MOST_FAILING_RUNS:
                raise PrivacyError(
                    f"this identity has joined {MOST_FAILING_RUNS} runs whose bounds on colluders may fail",
                    hint="a new niss-state folder and identity would be a new budget on the same data",
                )
            _check_failures(failures + failure, first.delta_failure)
            require_within(_limits(first, ceiling, failures + failure), joint_squared)
        return self.state.join(run, proposal, failure=failure, first_key=first_key)


class MemoryStore(Store):
    """Keeps everything in this process.

    charged   ledger of this one client
    budget    what the first charge was made against; None before it
    failures  what the grids of all rounds cost in delta
    """

    def __init__(self, entropy: Entropy = os.urandom) -> None:
        self.identity, self.state = Identity.generate(entropy), ClientState()
        self.charged, self.failures = Ledger.empty(1), 0.0
        self.budget: Budget | None = None

    def save(self) -> None:
        self.state.saves += 1

    def spent(self, budget: Budget) -> tuple[float, float, Budget]:
        # The first budget holds: a server cannot propose a second run to get a larger one.
        first = self.budget or budget
        return float(self.charged.joint_squared[0]), self.failures + self.state.failures, first

    def ledger(
        self, run: str, relation: str, budget: Budget, ceiling: Ceiling | None = None
    ) -> ChargeableLedger:
        del run, relation
        return _LedgerInMemory(self, budget, ceiling)


@dataclass(frozen=True)
class _LedgerInMemory:
    """Charges a store, and saves it at once: what follows the charge may fail."""

    store: MemoryStore
    budget: Budget
    ceiling: Ceiling | None

    def charge(
        self, round: int, attempt: int, mus: Mapping[str, tuple[float, float]], basis: Mapping[str, Any]
    ) -> None:
        del round, attempt  # The protocol's memory knows which rounds were answered.
        store, (joint, marginal) = self.store, mus[SELF]
        store.failures += require_room(store.spent(self.budget), self.budget, self.ceiling, joint, basis)
        store.budget = store.budget or self.budget
        store.charged.budget = np.array([store.budget.mu])
        store.charged.charge(np.zeros(1, dtype=np.int64), np.array([joint]), np.array([marginal]))
        store.save()


def require_room(
    spent: tuple[float, float, Budget],
    budget: Budget,
    ceiling: Ceiling | None,
    mu: float,
    basis: Mapping[str, Any],
) -> float:
    """Refuse (`PrivacyError`) a charge of mu that goes beyond what a client may spend; what its grid costs in delta.

    spent  what `Store.spent` gave
    basis  of the charge; nothing of its grid counts where nothing is promised
    """
    joint_squared, failures, first = spent
    grid = float(basis.get("grid_delta", 0.0)) if math.isfinite(budget.mu) else 0.0
    _check_failures(failures + grid, first.delta_failure)
    require_within(_limits(first, ceiling, failures + grid), joint_squared + mu**2)
    return grid


def _check_failures(failures: float, allowed: float) -> None:
    """Refuse runs whose bounds on colluders may fail more often, with what their grids cost, than delta has room for.

    By the union bound, all graphs together fail with the sum of their probabilities at most.
    """
    if failures > allowed * (1.0 + LIMITS):
        raise PrivacyError(
            "the bounds on colluders of all runs that this client joined may fail with probability "
            f"{failures:.2g}; its delta has room for {allowed:.2g}",
            hint="plan with a smaller delta than the nodes' niss-delta, or with more rounds (plan.chain_rounds); a new "
            "folder and identity would be a new budget on the same data",
        )


def _limits(first: Budget, ceiling: Ceiling | None, failures: float) -> list[Limit]:
    """The limits that hold for a client: the first budget, and its owner's of today."""
    limits = []
    if math.isfinite(first.mu):
        limits.append(Limit.of_ledger(first.mu, first.delta, first.delta_failure))
    if ceiling is not None:
        limits.append(Limit.of_owner(ceiling.setting, ceiling.epsilon, ceiling.delta, failures))
    return limits
