"""Can a plan learn anything? Its noise against the most that the clients' updates can move the model.

The mean of updates within the clip C moves the model by C a round at most, and by T C over T rounds. Noise of deviation
s in each of h coordinates has the norm `s sqrt(h)` a round and, independent from round to round, `s sqrt(h T)` over T
rounds. Their ratio over the run

    R = s sqrt(h) / (C sqrt(T))

does not depend on T for a fixed epsilon, since s grows as sqrt(T). On digits, 10 clients at C = 2 reach, without noise
and at R = 1, 2, 3, 5, 10: 88, 82, 63, 41, 19, 12 % with 1,970 parameters over 3 rounds (chance is 10 %), and
90, 90, 90, 89, 84, 58 % with 62,020. With 199,210, over 30 rounds of 200 clients, 89 % becomes 87, 77 and 24 % at
R = 1.4, 3.1 and 19. A larger model bears more, as noise in directions that matter to nobody does little harm: the
line between what costs accuracy and what leaves nothing is drawn at

    R = bearable * (1, 5)   with   bearable = max(1, h / 2,000)^(1/4)

which puts all of these on the right side. Where it is exactly depends on the task. The words below are a warning, and
no proof of either kind.

R takes the updates to be as long as the clip. Where they are half as long, the noise counts twice; clip and noise are
in proportion, so that a clip that fits the updates (`niss.mechanism.clipping`) mends that, and nothing else.

**Where records are hidden**, a round is one step along the mean of clipped gradients, which point in many directions:
what their noise costs goes with the noise of one round, `r = s sqrt(h) / C`, and hardly with the rounds. Lost against
the same training without noise, in points:

    digits, CNN of 26,010, 600 rounds      r = 0.25, 0.30, 0.8, 1.4         0.5, 0.7, 6, 16
    digits, CNN of 26,010, 100 rounds      r = 0.43, 1.4                    0.4, 12
    digits, linear, 500, 200 rounds        r = 0.14, 0.42, 1.4, 4.2, 14     0, 5, 25, 52, all
    patients, linear, 62, 40 rounds        r = 0.2, 0.6, 1.9, 6.3           0, 1.5, 3.5, 7.5

so the lines are drawn at r = 0.5 and 5, whatever the size of the model.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from niss.claims import digits
from niss.errors import ConfigError, PrivacyError
from niss.mechanism import Slots

if TYPE_CHECKING:
    from niss.accounting.asked import PlanQuestion
    from niss.accounting.planner import Forecast


NOISY, HOPELESS = 1.0, 5.0
"""Above which R noise costs accuracy, and above which little or nothing is learned, both for a small model."""
NOISY_STEP, HOPELESS_STEP = 0.5, 5.0
"""The same for r, where records are hidden."""
ASSUMED_MODEL = 10_000
"""The size that is judged where records are hidden and no other is named: a small network."""
SMALL_MODEL = 2_000
_SMALLER = "fewer parameters (a smaller model, or adapters such as LoRA: a quarter of them halves it), a larger epsilon"
_HELP = f"more clients in a round (twice as many halve it), {_SMALLER}"
_RECORDS_HELP = f"more records (twice as many halve it) or a larger batch, {_SMALLER}"
_CARRYING = (
    ", noise that is carried from round to round, or a clip that follows the norms of updates (`quantile`)"
)
_WORKED_OUT = (
    *("noise_norm", "ratio", "bearable", "hopeless", "largest", "verdict", "finding", "helps", "words"),
)
_BEYOND = {"noisy": "above {0} accuracy suffers", "hopeless": "above {1} next to nothing is learned"}


@dataclass(frozen=True)
class Outlook:
    """What a plan's noise means for a model; made by `outlook`.

    parameters  h: of the model, all those that are trained
    rounds      T: in how many rounds
    clip        C: how far a round can move the model
    deviation   s: of the noise in each coordinate of the mean update
    carried     whether noise is carried from round to round; s is then what a round leaves in the final model
    unit        what is hidden: where it is a `record`, an update is the mean of the clipped gradients of a batch
    assumed     whether nobody said how large the model is
    """

    parameters: int
    rounds: int
    clip: float
    deviation: float
    carried: bool = False
    unit: str = "client"
    assumed: bool = False

    @property
    def noise_norm(self) -> float:
        """Typical norm of the noise that a round adds to the model."""
        return self.deviation * math.sqrt(self.parameters)

    @property
    def ratio(self) -> float:
        """R: norm of the noise of the whole run, over the most that all updates can move the model; r for records."""
        return self.noise_norm / (self.clip * math.sqrt(1 if self.unit == "record" else self.rounds))

    @property
    def bearable(self) -> float:
        """The ratio up to which noise costs little."""
        if self.unit == "record":
            return NOISY_STEP
        return NOISY * float(max(1.0, self.parameters / SMALL_MODEL) ** 0.25)

    @property
    def hopeless(self) -> float:
        """The ratio from which on little or nothing is learned."""
        return self.bearable * (HOPELESS_STEP / NOISY_STEP if self.unit == "record" else HOPELESS / NOISY)

    @property
    def largest(self) -> int:
        """How many parameters, to two digits, a model may have that loses little, where records are hidden."""
        if not self.deviation:
            return self.parameters
        most = int((NOISY_STEP * self.clip / self.deviation) ** 2)
        digit = int(10 ** max(0, len(str(most)) - 2))
        return most // digit * digit

    @property
    def verdict(self) -> str:
        """`good`, `noisy` or `hopeless`."""
        return "hopeless" if self.ratio > self.hopeless else "noisy" if self.ratio > self.bearable else "good"

    @property
    def finding(self) -> str:
        """The verdict in a line: how much noise there is, and how much would be too much.

        The signal is the most that all updates together can move the model; for records, in one round.
        """
        assumed = f" in a model of {digits(self.parameters)} parameters, which is assumed" * self.assumed
        limit = _BEYOND.get(self.verdict, "up to {0} little is lost")
        limits = limit.format(digits(self.bearable, 2), digits(self.hopeless, 2))
        return f"noise {digits(self.ratio, 2)} times the signal{assumed}; {limits}"

    @property
    def helps(self) -> str:
        """What would lower the ratio, in words."""
        if self.unit == "record":
            return f"{_RECORDS_HELP}; up to {digits(self.largest)} parameters little is lost"
        return _HELP if self.carried else _HELP + _CARRYING  # What is carried takes one clip for all rounds.

    @property
    def words(self) -> str:
        """The finding and, where anything is needed, where to look for help: the same in every place that warns."""
        return self.finding + "; `niss plan` shows what helps" * (self.verdict != "good")

    def to_json(self) -> dict[str, Any]:
        """The numbers and the words, ready for `json.dumps`."""
        worked_out = {name: getattr(self, name) for name in _WORKED_OUT}
        return asdict(self) | worked_out | ({} if self.unit == "record" else {"largest": None})


def judge_plan(question: PlanQuestion, planned: Forecast) -> Outlook:
    """Judge the noise of the plan that answers a question, for a model of the size that is asked, or assumed.

    Where noise is carried, it is what stays in the final model that counts, spread evenly over the rounds.
    """
    rounds = question.rounds or planned.plan.turns
    variance = planned.aggregate_variance_ratio_to_central * planned.sigma**2
    if planned.run is not None:
        variance = planned.over_rounds["niss"][-1] / rounds
    size = ASSUMED_MODEL if question.parameters is None else question.parameters
    judged = outlook(
        parameters=size, rounds=rounds, clip=question.clip, variance=variance, unit=question.unit
    )
    return replace(judged, carried=question.carry, assumed=question.parameters is None)


def judge_records(question: PlanQuestion, planned: Forecast) -> dict[str, Any]:
    """What a plan for records rests on, what a lost silo costs in either mode, and what would change the noise.

    epsilon_batches_known   what is left of the promise if all batches became known
    one_lost_tolerated      noise of a round that loses one silo, over that of one curator, if it stays in the sum: a
                            silo leaves the shares it sent and received, `2 kappa` in units of a curator's noise
    one_lost_repaired       the same where the plan is for repairs; None: so few silos cannot be repaired
    levers                  by what is changed: by what factor the noise of the whole run over what its steps can do
                            changes
    """
    plan, size, rounds = planned.plan, question.participants, planned.plan.turns
    assert plan.batch is not None

    def changed(**change: Any) -> Forecast | None:
        with suppress(PrivacyError):
            return replace(question, **change).forecast()
        return None

    other = changed(mode="repair" if plan.mode == "tolerate" else "tolerate")
    tolerant, repairing = (planned, other) if plan.mode == "tolerate" else (other, planned)
    assert tolerant is not None
    left = (1.0 - 1.0 / size) * tolerant.aggregate_variance_ratio_to_central + 2.0 * tolerant.plan.kappa
    levers: dict[str, dict[str, Any]] = {
        "twice the rounds": {"rounds": 2 * rounds},
        "twice the batch": {"batch": min(2.0 * plan.batch, 1.0)},
        "twice the silos": {"participants": 2 * size},
        "no colluders" if question.collusion else "a fifth colluding": {
            "collusion": 0.0 if question.collusion else 0.2
        },
    }
    here, found = planned.noise_share / math.sqrt(rounds), {}
    for words, change in levers.items():
        if (with_it := changed(**change)) is not None:
            found[words] = with_it.noise_share / math.sqrt(change.get("rounds", rounds)) / here
    slots = Slots.of((plan.batch, planned.noise_multiplier or 0.0, rounds))
    return {
        "epsilon_batches_known": slots.epsilon_if_known(plan.gaussian_delta),
        "one_lost_tolerated": left,
        "one_lost_repaired": None if repairing is None else repairing.aggregate_variance_ratio_to_central,
        "levers": found,
    }


def outlook(*, parameters: int, rounds: int, clip: float, variance: float, unit: str = "client") -> Outlook:
    """Judge noise of this variance in each coordinate of the mean update, over so many rounds.

    A method's prediction for the sum of `p_k x_k` with weights that add up to 1 is such a variance
    (`RoundPlan.aggregate_variance`). Raises `ConfigError` for a model without parameters.
    """
    if parameters < 1:
        raise ConfigError(f"must be at least 1, not {parameters}", field="parameters")
    return Outlook(parameters, max(rounds, 1), clip, math.sqrt(variance), unit=unit)
