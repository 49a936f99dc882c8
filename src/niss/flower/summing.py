"""Which strategies can be wrapped: those that use the mean of the updates, and nothing else of them."""

from __future__ import annotations

from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy

from niss.errors import ConfigError

_EACH = "it looks at the update of each client, and under NISS the server learns their sum alone"
_OWN_NOISE = "it clips or adds noise of its own, and its claim would not be the one that NISS accounts for"
_TREES = "it collects trees, which cannot be summed"

_REASONS = {
    "FedMedian": f"a median is no sum: {_EACH}",
    "FedTrimmedAvg": f"a trimmed mean is no sum: {_EACH}",
    "Krum": f"it chooses among the updates: {_EACH}",
    "MultiKrum": f"it chooses among the updates: {_EACH}",
    "Bulyan": f"it chooses among the updates: {_EACH}",
    "QFedAvg": f"it weights each update by its norm and its loss: {_EACH}",
    "FedXgbBagging": _TREES,
    "FedXgbCyclic": _TREES,
    "DifferentialPrivacyServerSideFixedClipping": _OWN_NOISE,
    "DifferentialPrivacyClientSideFixedClipping": _OWN_NOISE,
    "DifferentialPrivacyServerSideAdaptiveClipping": _OWN_NOISE,
    "DifferentialPrivacyClientSideAdaptiveClipping": _OWN_NOISE,
}


def require_summing(strategy: Strategy) -> None:
    """Refuse a strategy of Flower's, or one derived from it, that needs more than the mean."""
    if not isinstance(strategy, Strategy):
        raise ConfigError(
            f"{type(strategy).__name__} is no strategy of flwr.serverapp.strategy",
            field="strategy",
            hint="the older strategies of flwr.server cannot be wrapped; use those of the Message API",
        )
    for name, reason in _REASONS.items():
        kind = getattr(flower, name, None)
        if kind is not None and isinstance(strategy, kind):
            raise ConfigError(
                f"{type(strategy).__name__} cannot be used: {reason}",
                field="strategy",
                hint="use one that averages, such as FedAvg, FedProx, FedAvgM, FedAdam, FedYogi or FedAdagrad",
            )
