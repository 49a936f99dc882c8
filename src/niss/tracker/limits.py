"""How much one address or identity may ask of the tracker, and how large a request may be."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, fields

from niss.errors import ConfigError

LARGEST_BATCH = 256
"""Most prekeys in one request."""
LARGEST_ROUND = 10_000
"""Most seats in one attempt."""
LONGEST_RUN = 25_000
"""Most rounds of one run, which bounds the time to derive its chain."""


@dataclass(frozen=True)
class Settings:
    """What the person who runs the tracker decides.

    ttl              seconds without a heartbeat after which a client is no longer seated
    forget_after     seconds after that until it is erased
    tolerance        seconds a client's clock may be off
    address_rate     requests a second from one address, on average; 0: any number
    identity_rate    the same for one identity, of requests that change something; the server is exempt
    body_bytes       largest body of a request
    max_clients      most clients that can be registered
    stock            most prekeys of one client; `low`: when it is told to replenish, up to `wanted`
    """

    ttl: float = 600.0
    forget_after: float = 30 * 86_400.0
    tolerance: float = 60.0
    address_rate: float = 200.0
    identity_rate: float = 10.0
    body_bytes: int = 1 << 20
    max_clients: int = 1_000_000
    stock: int = 1024
    low: int = 4
    wanted: int = 16

    def __post_init__(self) -> None:
        """Every setting is above 0 and finite; a rate may be 0, which means no limit."""
        for field in fields(self):
            value = getattr(self, field.name)
            may_be_zero = field.name.endswith("_rate")
            if not (0 < value < float("inf") or (may_be_zero and value == 0)):
                raise ConfigError("must be above 0", field=f"--{field.name.replace('_', '-')}")


class Buckets:
    """Token buckets by name: `rate` a second on average, twice that at once; a rate of 0 lets everything pass.

    Bounded in memory: of very many names the one not seen for longest is forgotten, and starts anew with a full bucket.
    """

    _MOST = 1 << 16

    def __init__(self, rate: float) -> None:
        self._rate, self._burst = rate, max(1.0, 2.0 * rate)
        self._levels: OrderedDict[object, tuple[float, float]] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, name: object, now: float) -> float:
        """0 if this request may pass, else how many seconds to wait. `now` is a monotonic time."""
        if not self._rate:
            return 0.0
        with self._lock:
            level, since = self._levels.pop(name, (self._burst, now))
            level = min(self._burst, level + (now - since) * self._rate)
            passes = level >= 1.0
            self._levels[name] = (level - 1.0 if passes else level, now)
            if len(self._levels) > self._MOST:
                self._levels.popitem(last=False)
            return 0.0 if passes else (1.0 - level) / self._rate
