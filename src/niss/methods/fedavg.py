"""FedAvg: no noise at all, the accuracy that everything else is measured against."""

# ruff: noqa: ARG002  (a method ignores what it does not need to know)

from __future__ import annotations

from typing import TYPE_CHECKING

from niss.methods.base import Method
from niss.methods.look import DOTTED, INK, Look

if TYPE_CHECKING:
    from niss.accounting.plans import Plan


class FedAvg(Method):
    """Updates are uploaded as they are; all variances are zero and every mu is infinite."""

    name = "fedavg"
    look = Look(INK, "p", DOTTED, hollow=True)
    trusts = "the server, and everyone who sees the uploads or the model"
    private = False

    def adversary(self, plan: Plan) -> str:
        return "none: the server sees every bare update"
