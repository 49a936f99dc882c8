"""`niss attack fake-dropout`: a server that calls a live client dropped, against repair with its rule off and on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar

from niss.attacks.experiment import (
    DEFAULT_PICTURE,
    Clients,
    Delta,
    Epsilon,
    Experiment,
    Findings,
    Help,
    Hidden,
    Image,
    Progress,
    Row,
    Seed,
)
from niss.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from niss.accounting import Plan
    from niss.attacks.protocol_rounds import DishonestServer, RevealedSecrets, Survivors, UploadedRound
    from niss.attacks.rounds import FloatArray

CLAIMS = ("all alive", "all dropped", "graded")


@dataclass(frozen=True, kw_only=True)
class FakeDropoutExperiment(Experiment):
    """Three claims, each against clients that remember their verdict and clients that do not.

    `all alive` and `all dropped` tell every neighbour of the victim the same; `graded` tells as many as the threshold
    needs that it is alive, which gets the self-mask, and the others that it dropped, which gets their edges. The server
    proposes the threshold: the fewer pieces rebuild a self-mask, the more neighbours are left to be asked for edges.
    """

    name: ClassVar[str] = "fake-dropout"
    summary: ClassVar[str] = (
        "A server calls a live client dropped to have its noise revealed: the one-verdict rule off and on."
    )
    examples: ClassVar[tuple[str, ...]] = ("niss attack fake-dropout --out runs/fake-dropout",)
    columns: ClassVar[dict[str, str]] = {
        "story": "Server's claim",
        "rule": "One verdict a round",
        "edges": "Edges of the victim",
        "mask_rebuilt": "Mask rebuilt",
        "left": "Noise left ÷ charged",
        "epsilon": "ε reached",
        "promised": "ε promised",
        "error": "Error ÷ update",
        "predicted_error": "Error, predicted",
    }

    image: Image = DEFAULT_PICTURE
    clients: Clients = 24
    epsilon: Epsilon = None
    delta: Delta = None
    threshold_share: Annotated[
        float, Help("Part of the neighbours whose pieces rebuild a mask, as the server proposes.")
    ] = 0.1
    hidden: Hidden = 4
    seed: Seed = 1

    def check(self) -> None:
        """Refuse what cannot be used."""
        from niss.attacks.pictures import load_pictures
        from niss.randomness import SimStream

        if self.clients < 6:
            raise ConfigError(
                f"must be at least 6, not {self.clients}",
                field="--clients",
                hint="the server needs neighbours to divide",
            )
        if not 0.0 < self.threshold_share <= 1.0:
            raise ConfigError(
                f"must be above 0 and at most 1, not {self.threshold_share!r}", field="--threshold-share"
            )
        self._plan()
        SimStream(self.seed)
        load_pictures(self.image)

    def _plan(self) -> Plan:
        from niss.attacks.rounds import make_setting

        setting = make_setting(
            "default",
            clients=self.clients,
            epsilon=self.epsilon,
            delta=self.delta,
            neighbours=float(self.clients - 1),
        )
        return setting.with_plan(revealed=1, dropped=1).plan

    def run(self, findings: Findings, progress: Progress) -> None:
        """Gather the uploads of one round, then try each claim on the clients as they were after it."""
        from niss.attacks.federation import make_federation
        from niss.attacks.pictures import load_pictures
        from niss.attacks.protocol_rounds import DishonestServer, claim_survivors
        from niss.attacks.rounds import clip_update
        from niss.randomness import SimStream

        stream, plan = SimStream(self.seed), self._plan()
        federation = make_federation(
            load_pictures(self.image),
            model="mlp",
            hidden=(self.hidden,),
            clients=self.clients,
            stream=stream.child("scene"),
        )
        updates = [clip_update(row, plan) for row in federation.updates]
        server = DishonestServer(
            plan,
            self.clients,
            coordinates=updates[0].size,
            mode="repair",
            stream=stream.child("parties"),
        )
        uploaded = server.collect(
            updates, progress=partial(progress, "uploads"), threshold_share=self.threshold_share
        )
        cases = [(claim, remembers) for claim in CLAIMS for remembers in (False, True)]
        for number, (claim, remembers) in enumerate(cases, start=1):
            rule = "on" if remembers else "off"
            revealed = claim_survivors(server, uploaded, self._claims(uploaded, claim), remembers=remembers)
            findings.rows.append({"story": claim, "rule": rule, **_row(server, uploaded, revealed, updates)})
            progress("claims", number, len(cases), f"{claim}, rule {rule}")
        by = {(row["story"], row["rule"]): row for row in findings.rows}
        off, on = by["graded", "off"], by["graded", "on"]
        findings.headline = (
            f"The graded claim leaves {100 * off['left']:.0f} % of the charged noise (ε {off['epsilon']:.2f}) where "
            f"clients sign twice, and {100 * on['left']:.0f} % (ε {on['epsilon']:.2f}) where they sign once; "
            f"ε {on['promised']:.2f} was promised."
        )
        findings.finished = True

    def _claims(self, uploaded: UploadedRound, claim: str) -> dict[int, list[Survivors]]:
        """What each client is told: first the survivors it shall reveal for, then those it shall only sign."""
        from niss.attacks.federation import VICTIM
        from niss.attacks.protocol_rounds import all_but

        near = uploaded.agreed.neighbours(VICTIM)
        told_alive = {
            "all alive": len(near),
            "all dropped": 0,
            "graded": uploaded.agreed.threshold(VICTIM),
        }
        believers = set(near[: told_alive[claim]])
        alive, dropped = all_but(self.clients, ()), all_but(self.clients, (VICTIM,))
        return {seat: [alive, dropped] if seat in believers else [dropped, alive] for seat in dropped}

    def draw(self, findings: Findings) -> Figure | None:
        """One pair of bars per claim: the noise left with the rule off and on; below 1 is less than was charged."""
        import numpy as np

        from niss.attacks import drawing

        if not findings.rows:
            return None
        claims = list(dict.fromkeys(row["story"] for row in findings.rows))
        by = {(row["story"], row["rule"]): row for row in findings.rows}
        with drawing.style():
            figure = drawing.new_figure(3.6)
            axes = figure.subplots()
            places = np.arange(len(claims))
            for number, (rule, hatch) in enumerate((("off", "//"), ("on", ""))):
                rows = [by.get((claim, rule)) for claim in claims]
                bars = axes.bar(
                    places + 0.4 * (number - 0.5),
                    [row["left"] if row else 0.0 for row in rows],
                    width=0.36,
                    color=drawing.SERIES[1 - number],
                    hatch=hatch,
                    edgecolor="white",
                    label=f"rule {rule}",
                )
                texts = [f"{row['left']:.2f}\nε {row['epsilon']:.1f}" if row else "" for row in rows]
                axes.bar_label(bars, texts, fontsize=9.5, padding=2)
            axes.axhline(1.0, color=drawing.INK, linewidth=1.3, linestyle="--", label="charged")
            axes.set_xticks(places, [f"“{claim}”" for claim in claims])
            axes.set_xlabel("What the server tells the victim's neighbours")
            axes.set_ylabel("Noise variance left ÷ charged")
            axes.set_ylim(0.0, 1.45 * max(1.0, *(row["left"] for row in findings.rows)))
            drawing.grid(axes, "y")
            axes.legend(loc="upper left", ncols=3, title="One verdict a round", alignment="left")
        return figure


def _row(
    server: DishonestServer, uploaded: UploadedRound, revealed: RevealedSecrets, updates: list[FloatArray]
) -> Row:
    """What the victim's noise was charged as, what is left of it, and how well the server then guesses its update."""
    import numpy as np

    from niss.attacks.federation import VICTIM
    from niss.attacks.protocol_rounds import estimate_from_revealed, rebuild_masks, variance_left
    from niss.attacks.rounds import relative_error
    from niss.mechanism import gdp_epsilon

    size, delta, truth = server.size, server.plan.delta, updates[VICTIM]
    sensitivity = float(server.plan.sensitivity(1.0 / size, 1.0))
    mu = max(server.clients[VICTIM].charged)
    left = variance_left(uploaded, revealed, VICTIM)
    known = {seat: update for seat, update in enumerate(updates) if seat != VICTIM}
    guess = estimate_from_revealed(uploaded, revealed, known, VICTIM)
    return {
        "edges": sum(VICTIM in ends for ends in revealed.edges),
        "mask_rebuilt": VICTIM in rebuild_masks(uploaded, revealed),
        "left": left / (sensitivity / mu) ** 2,
        "epsilon": gdp_epsilon(sensitivity / float(np.sqrt(left)), delta),
        "promised": gdp_epsilon(mu, delta),
        "error": relative_error(guess, truth),
        "predicted_error": float(size * np.sqrt(left * truth.size / np.sum(truth**2))),
    }
