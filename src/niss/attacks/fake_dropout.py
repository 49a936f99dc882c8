"""`niss attack fake-dropout`: a server that calls a live client dropped, against repair with its rule off and on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import TYPE_CHECKING, ClassVar

from niss import attacks
from niss.attacks import experiment
from niss.attacks.experiment import VICTIM, Findings, Progress, Row
from niss.claims import rounded_up
from niss.errors import ConfigError

if TYPE_CHECKING:
    from niss.charts import Chart

CLAIMS = ("all alive", "all dropped", "graded")


@dataclass(frozen=True, kw_only=True)
class FakeDropoutExperiment(experiment.PictureExperiment):
    """A server calls a live client dropped to have its noise revealed: the rule of one answer a round off and on.

    Three claims, each against members of the committee that remember what they answered (the rule is on) and members
    that do not (off).

    `all alive` and `all dropped` tell every member the same; `graded` tells as many as the threshold needs that the
    victim is alive, which gets its self-mask, and the others that it dropped out, for its edges; then each the other.

    The accountant says what noise each outcome leaves the victim, in parts of what its ledger was charged for; the
    server's best linear estimate of the update then errs as much as that predicts. With the rule on, no claim may leave
    less than was charged.

    Examples:
        niss attack fake-dropout --out runs/fake-dropout
    """

    name = "fake-dropout"
    columns: ClassVar[dict[str, str]] = {
        "story": "Server's claim",
        "rule": "One answer a round",
        "edges": "Edges of the victim",
        "mask_rebuilt": "Mask rebuilt",
        "left": "Noise left ÷ charged",
        "epsilon": "ε reached",
        "promised": "ε promised",
        **experiment.ERROR_COLUMNS,
    }

    clients: experiment.Clients = 24

    def check(self) -> None:
        """Refuse what cannot be used."""
        super().check()
        if self.clients < 6:
            raise ConfigError(
                f"must be at least 6, not {self.clients}",
                field="--clients",
                hint="the server needs a committee to divide",
            )

    def setting(self) -> attacks.RoundSetting:
        """Everyone shares noise with everyone, and edges may be revealed to repair one dropout."""
        return self.make_setting(neighbours=self.clients - 1.0).with_plan(revealed=1, dropped=1)

    def run(self, findings: Findings, progress: Progress) -> None:
        """Gather the uploads of one round, then try each claim on the clients as they were after it."""
        plan, federation = self.setting().plan, self.train(findings)
        updates = [attacks.rounds.clip_update(row, plan) for row in federation.updates]
        server = attacks.protocol_rounds.DishonestServer(
            plan,
            self.clients,
            coordinates=updates[0].size,
            mode="repair",
            stream=self.stream("parties"),
        )
        uploaded = server.collect(updates, progress=partial(progress, "uploads"))
        cases = [(claim, remembers) for claim in CLAIMS for remembers in (False, True)]
        for number, (claim, remembers) in enumerate(cases, start=1):
            rule = "on" if remembers else "off"
            claims = self._claims(uploaded, claim)
            revealed = attacks.protocol_rounds.claim_survivors(server, uploaded, claims, remembers=remembers)
            findings.rows.append({"story": claim, "rule": rule, **_row(server, uploaded, revealed, updates)})
            progress("claims", number, len(cases), f"{claim}, rule {rule}")
        by = {(row["story"], row["rule"]): row for row in findings.rows}
        off, on = by["graded", "off"], by["graded", "on"]
        twice, once = (rounded_up(row["epsilon"]) for row in (off, on))
        findings.headline = (
            f"The graded claim leaves {100 * off['left']:.0f} % of the charged noise (ε {twice}) where "
            f"members answer twice, and {100 * on['left']:.0f} % (ε {once}) where they answer once; "
            f"ε {rounded_up(on['promised'])} was promised."
        )
        findings.finished = True

    def _claims(
        self, uploaded: attacks.protocol_rounds.UploadedRound, claim: str
    ) -> dict[int, list[attacks.protocol_rounds.Survivors]]:
        """What each member of the committee but the victim is told, one survivor set after the other."""
        all_but = attacks.protocol_rounds.all_but
        members = [seat for seat in uploaded.agreed.committee if seat != VICTIM]
        told_alive = {
            "all alive": len(members),
            "all dropped": 0,
            "graded": uploaded.agreed.terms.threshold,
        }
        believers = set(members[: told_alive[claim]])
        alive, dropped = all_but(self.clients, ()), all_but(self.clients, (VICTIM,))
        if claim != "graded":
            return {seat: [alive if seat in believers else dropped] for seat in members}
        return {seat: [alive, dropped] if seat in believers else [dropped, alive] for seat in members}

    def charts(self, findings: Findings) -> list[Chart]:
        """The noise left after each claim, with the rule off and on; below 1 is less than was charged."""
        from niss.charts import Mark, Rows, numbered

        rows: dict[str, list[Mark]] = {}
        for row in findings.rows:
            look, spent = numbered(0 if row["rule"] == "on" else 1), rounded_up(row["epsilon"])
            mark = Mark(f"rule {row['rule']}", look, row["left"], f"{row['left']:.2f}, ε {spent}")
            rows.setdefault(f"“{row['story']}”", []).append(mark)
        return [
            Rows(
                title="Noise left by what the server tells the committee",
                across="Noise variance left ÷ charged",
                rows=list(rows.items()),
                level=("charged", 1.0),
            )
        ]


def _row(
    server: attacks.protocol_rounds.DishonestServer,
    uploaded: attacks.protocol_rounds.UploadedRound,
    revealed: attacks.protocol_rounds.RevealedSecrets,
    updates: list[attacks.observation.FloatArray],
) -> Row:
    """What the victim's noise was charged as, what is left of it, and how well the server then guesses its update."""
    from niss.mechanism import gdp_epsilon

    protocol_rounds = attacks.protocol_rounds
    size, delta, truth = server.size, server.plan.delta, updates[VICTIM]
    sensitivity = float(server.plan.sensitivity(1.0 / size, 1.0))
    mu = max(server.clients[VICTIM].charged)
    left = protocol_rounds.variance_left(uploaded, revealed, VICTIM)
    known = {seat: update for seat, update in enumerate(updates) if seat != VICTIM}
    guess = protocol_rounds.estimate_from_revealed(uploaded, revealed, known, VICTIM)
    return {
        "edges": sum(VICTIM in ends for ends in protocol_rounds.known_edges(uploaded, revealed)),
        "mask_rebuilt": VICTIM in protocol_rounds.rebuild_masks(uploaded, revealed),
        "left": left / (sensitivity / mu) ** 2,
        "epsilon": gdp_epsilon(sensitivity / sqrt(left), delta),
        "promised": gdp_epsilon(mu, delta),
        "error": attacks.relative_error(guess, truth),
        "predicted_error": size * sqrt(left * truth.size / float((truth**2).sum())),
    }
