"""`niss attack audit`: canaries over many rounds, and the epsilon they prove beside the one that is claimed."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from scipy.stats import norm

from niss.accounting import RoundPlan
from niss.attacks.canary import CanaryScores, canary_scores, epsilon_bound
from niss.attacks.findings import Findings, Progress
from niss.attacks.plans import Setting, make_setting
from niss.errors import ConfigError
from niss.mechanism import gdp_epsilon
from niss.randomness import SimStream

COLUMNS = {
    "case": "Case",
    "joint": "ε claimed, joint",
    "marginal": "ε claimed, marginal",
    "proved": "ε proved",
    "true_positive": "True positives",
    "false_positive": "False positives",
    "counted": "Rounds counted",
    "verdict": "What follows",
}
_RATES = 60


@dataclass(frozen=True, kw_only=True)
class AuditExperiment:
    """NISS calibrated, NISS as printed (tau = 0) and DP-FedAvg, each with canaries in half of its rounds."""

    clients: int = 12
    neighbours: float = 4.0
    epsilon: float | None = None
    delta: float | None = None
    dimension: int = 8
    rounds: int = 100_000
    confidence: float = 0.95
    seed: int = 1

    def start(self) -> Findings:
        if self.rounds < 100:
            raise ConfigError(
                f"must be at least 100, not {self.rounds}",
                field="--rounds",
                hint="few rounds prove little: 100000 is a good number",
            )
        if self.dimension < 1:
            raise ConfigError(f"must be at least 1, not {self.dimension}", field="--dimension")
        if not 0.5 <= self.confidence < 1.0:
            raise ConfigError(f"must lie in [0.5, 1), not {self.confidence!r}", field="--confidence")
        SimStream(self.seed)
        for setting in self._cases().values():
            self._round(setting)
        return Findings("audit", asdict(self), dict(COLUMNS))

    def _cases(self) -> dict[str, Setting]:
        setting = make_setting(
            "default",
            clients=self.clients,
            epsilon=self.epsilon,
            delta=self.delta,
            neighbours=self.neighbours,
        )
        return {
            "niss, calibrated τ²": setting,
            "niss, τ = 0": setting.with_tau2(0.0),
            "dp-fedavg": setting.with_method("dp-fedavg"),
        }

    def _round(self, setting: Setting) -> RoundPlan:
        return setting.plan.for_round(
            np.arange(self.clients),
            weights=np.full(self.clients, 1.0 / self.clients),
            records=np.ones(self.clients),
            beacon=b"audit",
        )

    def run(self, findings: Findings, progress: Progress) -> None:
        stream = SimStream(self.seed)
        for name, setting in self._cases().items():
            plan = self._round(setting)
            joint, marginal = plan.joint_mu, plan.marginal_mu
            # The worst protected client; where nobody is protected, the first.
            victim = int(np.argmax(joint))

            def said(done: int, total: int, name: str = name) -> None:
                progress(name, done, total, "")

            scores = canary_scores(
                plan,
                victim,
                share=np.full(self.clients, 1.0 / self.clients),
                dimension=self.dimension,
                rounds=self.rounds,
                stream=stream.child(name),
                progress=said,
            )
            bound = epsilon_bound(scores, setting.plan.delta, self.confidence)
            claims = [gdp_epsilon(float(mu[victim]), setting.plan.delta) for mu in (joint, marginal)]
            findings.rows.append(
                {
                    "case": name,
                    "joint": claims[0],
                    "marginal": claims[1],
                    "proved": bound.epsilon,
                    "true_positive": bound.true_positive,
                    "false_positive": bound.false_positive,
                    "counted": bound.counted,
                    "verdict": _verdict(bound.epsilon, *claims),
                    "mu": float(joint[victim]),
                }
            )
            findings.curves.setdefault("rates", {})[name] = _rates(scores, float(joint[victim]))
        findings.headline = _headline(findings, self.confidence)
        findings.finished = True


def _verdict(proved: float, joint: float, marginal: float) -> str:
    if proved > joint:
        return "the joint claim is refuted"
    if proved > marginal:
        return "the marginal claim is refuted"
    return "consistent with the claims"


def _rates(scores: CanaryScores, mu: float) -> dict[str, list[float]]:
    """True- over false-positive rates as measured, and as mu-GDP allows: Phi(Phi^-1(rate) + mu)."""
    alarms = np.geomspace(10.0 / scores.without.size, 1.0 - 1e-9, _RATES)
    thresholds = np.quantile(scores.without, 1.0 - alarms)
    hits = [float(np.mean(scores.present > level)) for level in thresholds]
    most = norm.cdf(norm.ppf(alarms) + mu) if np.isfinite(mu) else np.ones(_RATES)
    return {"false_positive": alarms.tolist(), "true_positive": hits, "most": most.tolist()}


def _headline(findings: Findings, confidence: float) -> str:
    parts = []
    for row in findings.rows:
        claimed = f"{row['joint']:.2f}" if np.isfinite(row["joint"]) else "none"
        parts.append(f"{row['case']}: ε ≥ {row['proved']:.2f} proved, {claimed} claimed in the joint view")
    return "; ".join(parts) + f" (each with {100 * confidence:g} % confidence)."
