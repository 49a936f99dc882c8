"""One round with updates of your own, and what three servers make of one client's upload.

python examples/attack_upload.py
"""

from __future__ import annotations

import numpy as np

from niss import Plan
from niss.attacks.estimates import estimate_alone, estimate_jointly
from niss.attacks.rounds import recovered_fraction, relative_error, simulate_round
from niss.randomness import SimStream

CLIENTS, PARAMETERS, VICTIM = 20, 5000, 0


def main() -> None:
    updates = np.random.default_rng(1).normal(size=(CLIENTS, PARAMETERS))
    others = [seat for seat in range(CLIENTS) if seat != VICTIM]
    cases = (
        ("tau = 0, one upload alone", Plan(tau2=0.0), estimate_alone),
        ("tau = 0, all uploads", Plan(tau2=0.0), estimate_jointly),
        ("calibrated, all uploads", Plan(), estimate_jointly),
    )
    print(f"{'case':28}{'error / update':>16}{'predicted':>12}{'recovered':>12}")
    for name, plan, attack in cases:
        simulated = simulate_round(updates, plan, stream=SimStream(1), knows_updates_of=others)
        guess, truth = attack(simulated.observation, VICTIM), simulated.updates[VICTIM]
        predicted = np.sqrt(np.sum(guess.variance) / np.sum(truth**2))
        error, part = relative_error(guess.update, truth), recovered_fraction(guess.update, truth)
        print(f"{name:28}{error:16.3g}{predicted:12.3g}{part:12.1%}")


if __name__ == "__main__":
    main()
