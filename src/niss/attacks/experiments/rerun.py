"""`niss attack rerun`: the same round again, against a client that has lost its memory.

The seeds of the shares follow from the round's context, which is the same again: y - y' = p (x - x') + eta - eta', and
the shares are gone. The second time the server sends a model of zeros, on which nothing but the last bias can move, so
that x' is known up to a label; and it asks again and again until the fresh residual noise has averaged out too.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from niss.accounting import Plan
from niss.attacks.findings import Findings, Progress, Row
from niss.attacks.parties import Parties, agreed_on, vector_of
from niss.attacks.pictures import DEFAULT_PICTURE, load_pictures
from niss.attacks.plans import make_setting
from niss.attacks.reading import read_picture
from niss.attacks.scene import VICTIM, make_scene
from niss.attacks.scores import blind_guess, score_pictures
from niss.attacks.staging import clip_update, relative_error
from niss.errors import ConfigError, PrivacyError, RemoteProtocolError
from niss.protocol.messages import RoundOpen
from niss.randomness import SimStream

FloatArray = NDArray[np.float64]

COLUMNS = {
    "client": "Client",
    "answers": "Answers",
    "refusal": "Second answer",
    "error": "Error ÷ update",
    "predicted_error": "Error, predicted",
    "psnr": "PSNR, dB",
}


@dataclass(frozen=True, kw_only=True)
class RerunExperiment:
    """Half of the answers are to the real model, half to the model of zeros."""

    image: str = DEFAULT_PICTURE
    clients: int = 24
    epsilon: float | None = None
    delta: float | None = None
    hidden: int = 4
    repeats: int = 1024
    seed: int = 1

    def start(self) -> Findings:
        if self.repeats < 1:
            raise ConfigError(f"must be at least 1, not {self.repeats}", field="--repeats")
        self._plan()
        SimStream(self.seed)
        load_pictures(self.image)
        return Findings("rerun", asdict(self), dict(COLUMNS))

    def _plan(self) -> Plan:
        return make_setting(
            "default",
            clients=self.clients,
            epsilon=self.epsilon,
            delta=self.delta,
            neighbours=float(self.clients - 1),
        ).plan

    def run(self, findings: Findings, progress: Progress) -> None:
        stream, plan, pictures = SimStream(self.seed), self._plan(), load_pictures(self.image)
        scene = make_scene(
            pictures,
            model="mlp",
            hidden=(self.hidden,),
            clients=self.clients,
            stream=stream.child("scene"),
        )
        truth = clip_update(scene.updates[VICTIM], plan)
        parties = Parties(
            plan, self.clients, coordinates=truth.size, mode="tolerate", stream=stream.child("parties")
        )
        opened = parties.open()
        agreed = agreed_on(opened)
        before = parties.parties[VICTIM].stored[-1]
        zeros = torch.zeros_like(scene.weights)
        dead = clip_update(scene.victims_update_from(zeros, stream.child("dead")), plan)
        findings.pictures["original"] = pictures.pixels[0]
        findings.curves["blind_guess_psnr"] = blind_guess(pictures.pixels)
        findings.rows.append(_remembering(parties, opened, truth))
        eta = float(np.sqrt(agreed.terms.residual_variance))
        energy = float(np.sum(truth**2))
        # What the server does not know of the dead model's update stays in the difference.
        unknown = float(np.sum(dead**2))
        total = np.zeros_like(truth)
        marks = {2**power for power in range(0, 31, 2)} | {self.repeats}
        for number in range(1, self.repeats + 1):
            for update, sign in ((truth, 1.0), (dead, -1.0)):
                parties.parties[VICTIM].put_back(before)
                total += sign * vector_of(parties.upload(opened, VICTIM, update), agreed)
            progress("answers", number, self.repeats, "")
            if number not in marks:
                continue
            guess = self.clients * total / number
            shown = read_picture(scene.as_gradient(guess), scene.imitation(), scene.pictures)
            findings.rows.append(
                {
                    "client": "without memory",
                    "answers": 2 * number,
                    "refusal": "given",
                    "error": relative_error(guess, truth),
                    "predicted_error": float(
                        np.sqrt((2.0 * (self.clients * eta) ** 2 * truth.size / number + unknown) / energy)
                    ),
                    "psnr": score_pictures(shown, pictures.pixels).psnr,
                }
            )
            findings.pictures.setdefault("steps", []).append((2 * number, shown[0]))
        last = findings.rows[-1]
        findings.headline = (
            f"A client with its memory refuses the second time. Without it, {last['answers']} answers to one round "
            f"leave an error of {last['error']:.2g} times the update and a picture of {last['psnr']:.1f} dB."
        )
        findings.finished = True


def _remembering(parties: Parties, opened: RoundOpen, truth: FloatArray) -> Row:
    """The client as it is meant to be: it answers once."""
    parties.upload(opened, VICTIM, truth)
    try:
        parties.upload(opened, VICTIM, truth)
    except RemoteProtocolError as error:
        return {"client": "with memory", "answers": 1, "refusal": f"refused: {error.message}"}
    raise PrivacyError("a client with its memory answered the same round twice")
