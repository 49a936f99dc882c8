"""A claim of the text, and whether the result files bear it out."""

from __future__ import annotations

from dataclasses import dataclass

UNMEASURED = "not measured yet"


@dataclass(frozen=True)
class Claim:
    """One claim: `holds` is None where nothing is measured yet. One that is not `required` is the paper's, not ours."""

    name: str
    holds: bool | None
    detail: str
    required: bool = True

    @property
    def verdict(self) -> str:
        if self.holds is None:
            return UNMEASURED
        if self.holds:
            return "holds"
        return "does not hold" if self.required else "differs"
