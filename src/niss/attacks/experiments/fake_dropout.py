"""`niss attack fake-dropout`: a server that calls a live client dropped, against repair with its rule off and on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import numpy as np

from niss.accounting import Plan
from niss.attacks.findings import Findings, Progress, Row
from niss.attacks.parties import Parties, agreed_on, without
from niss.attacks.pictures import DEFAULT_PICTURE, load_pictures
from niss.attacks.plans import make_setting
from niss.attacks.scene import VICTIM, Scene, make_scene
from niss.attacks.staging import clip_update, relative_error
from niss.attacks.stripping import Loot, Survivors, Uploaded, rebuilt_masks, strip, tell, variance_left
from niss.errors import ConfigError
from niss.mechanism import gdp_epsilon
from niss.randomness import SimStream

COLUMNS = {
    "story": "Story told",
    "rule": "One verdict a round",
    "edges": "Edges of the victim",
    "mask_rebuilt": "Mask rebuilt",
    "left": "Noise left ÷ charged",
    "epsilon": "ε reached",
    "promised": "ε promised",
    "error": "Error ÷ update",
    "predicted_error": "Error, predicted",
}
STORIES = ("all alive", "all dropped", "graded")


@dataclass(frozen=True, kw_only=True)
class FakeDropoutExperiment:
    """Three stories, each against clients that remember their verdict and clients that do not.

    The server proposes the threshold: the fewer pieces rebuild a self-mask, the more neighbours are left to be
    asked for edges.
    """

    image: str = DEFAULT_PICTURE
    clients: int = 24
    epsilon: float | None = None
    delta: float | None = None
    hidden: int = 4
    threshold_share: float = 0.1
    seed: int = 1

    def start(self) -> Findings:
        if self.clients < 6:
            raise ConfigError(
                f"must be at least 6, not {self.clients}", field="--clients", hint="neighbours to divide"
            )
        if not 0.0 < self.threshold_share <= 1.0:
            raise ConfigError(f"must lie in (0, 1], not {self.threshold_share!r}", field="--threshold-share")
        self._plan()
        SimStream(self.seed)
        load_pictures(self.image)
        return Findings("fake-dropout", asdict(self), dict(COLUMNS))

    def _plan(self) -> Plan:
        setting = make_setting(
            "default",
            clients=self.clients,
            epsilon=self.epsilon,
            delta=self.delta,
            neighbours=float(self.clients - 1),
        )
        return replace(setting.plan, revealed=1, dropped=1)

    def run(self, findings: Findings, progress: Progress) -> None:
        stream, plan = SimStream(self.seed), self._plan()
        scene = make_scene(
            load_pictures(self.image),
            model="mlp",
            hidden=(self.hidden,),
            clients=self.clients,
            stream=stream.child("scene"),
        )
        updates = [clip_update(row, plan) for row in scene.updates]
        parties = Parties(
            plan,
            self.clients,
            coordinates=scene.updates.shape[1],
            mode="repair",
            stream=stream.child("parties"),
        )
        round_ = _upload_all(parties, updates, self.threshold_share, progress)
        cases = [(story, remembers) for story in STORIES for remembers in (False, True)]
        for number, (story, remembers) in enumerate(cases, start=1):
            loot = tell(parties, round_, self._stories(round_, story), remembers=remembers)
            row = self._row(scene, parties, round_, loot, updates)
            findings.rows.append({"story": story, "rule": "on" if remembers else "off", **row})
            progress("stories", number, len(cases), f"{story}, rule {'on' if remembers else 'off'}")
        by = {(row["story"], row["rule"]): row for row in findings.rows}
        off, on = by["graded", "off"], by["graded", "on"]
        findings.headline = (
            f"The graded story leaves {100 * off['left']:.0f} % of the charged noise (ε {off['epsilon']:.2f}) where "
            f"clients sign twice, and {100 * on['left']:.0f} % (ε {on['epsilon']:.2f}) where they sign once; "
            f"ε {on['promised']:.2f} was promised."
        )
        findings.finished = True

    def _stories(self, round_: Uploaded, story: str) -> dict[int, list[Survivors]]:
        """Who hears what: first the story it shall reveal for, then the one it shall only sign."""
        alive, gone = without(self.clients, ()), without(self.clients, (VICTIM,))
        near = round_.agreed.neighbours(VICTIM)
        if story == "all alive":
            believers = set(near)
        elif story == "all dropped":
            believers = set()
        else:
            believers = set(near[: round_.agreed.threshold(VICTIM)])
        others = [seat for seat in range(self.clients) if seat != VICTIM]
        return {seat: [alive, gone] if seat in believers else [gone, alive] for seat in others}

    def _row(
        self, scene: Scene, parties: Parties, round_: Uploaded, loot: Loot, updates: list[np.ndarray]
    ) -> Row:
        plan = parties.plan
        moved = float(plan.sensitivity(1.0 / self.clients, 1.0))
        charged = (moved / max(parties.parties[VICTIM].charged)) ** 2
        left = variance_left(round_, loot, VICTIM)
        truth = updates[VICTIM]
        known = {seat: update for seat, update in enumerate(updates) if seat != VICTIM}
        guess = strip(round_, loot, known, VICTIM)
        return {
            "edges": sum(VICTIM in ends for ends in loot.edges),
            "mask_rebuilt": VICTIM in rebuilt_masks(round_, loot),
            "left": left / charged,
            "epsilon": gdp_epsilon(moved / float(np.sqrt(left)), plan.delta),
            "promised": gdp_epsilon(max(parties.parties[VICTIM].charged), plan.delta),
            "error": relative_error(guess, truth),
            "predicted_error": float(
                self.clients * np.sqrt(left * scene.updates.shape[1] / np.sum(truth**2))
            ),
        }


def _upload_all(
    parties: Parties, updates: list[np.ndarray], threshold_share: float, progress: Progress
) -> Uploaded:
    opened = parties.open(threshold_share=threshold_share)
    uploads = {}
    for seat, update in enumerate(updates):
        uploads[seat] = parties.upload(opened, seat, update)
        progress("uploads", seat + 1, len(updates), "")
    stored = tuple(party.stored[-1] for party in parties.parties)
    return Uploaded(opened, agreed_on(opened), uploads, stored)
