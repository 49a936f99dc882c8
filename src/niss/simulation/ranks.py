"""Several processes that train one run together: who trains which clients, and what they sum over all of them.

    torchrun --nproc-per-node 4 -m niss run ...

Every process ("rank") goes through the same rounds with the same seed. It trains the clients dealt to it, bounds what
they learned and adds the noise of their seats; noise is named by seed, round and seat or edge, so whoever needs it
draws it, and an edge between two ranks is drawn by both. One sum over all ranks a round, in float64, gives everyone the
same bits, and everyone moves its copy of the model by it. Rank 0 alone has the folder of the run.

Sums go through gloo, on GPUs too: rows are summed where they were made, and one vector a rank is left. Compared with
one process only the order of summation differs; with the same number of ranks nothing does.

Ranks trust each other, and gloo's connections are neither encrypted nor authenticated: they belong on a network of
their own.
"""

from __future__ import annotations

import atexit
import contextlib
import heapq
import json
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niss.errors import ConfigError, NissError, RanksError
from niss.simulation.uploads import Seats

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

TIMEOUT = 1800.0
"""Seconds that a rank waits for the others before it gives up; `NISS_RANK_TIMEOUT` sets another number."""
_CHECK_IN = 3.0
"""Seconds that ranks are given to say that they are still there, once one of them is not."""
_LINGER = 10.0
"""Seconds that a process which holds what ranks tell each other stays for them to read it, once it has failed."""
_ASKING = 0.2
"""Seconds after which a rank that waits looks whether another has failed."""


@dataclass(frozen=True)
class Place:
    """Where a process stands among those started together.

    rank, count              its number, from 0, and how many there are
    local_rank, local_count  the same among those on its own machine
    """

    rank: int
    count: int
    local_rank: int
    local_count: int


def place_in(environment: Mapping[str, str]) -> Place | None:
    """What torchrun (or any launcher that sets the same variables) says; None where this is the only process."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    try:
        rank, count = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local = int(environment.get("LOCAL_RANK", rank)), int(environment.get("LOCAL_WORLD_SIZE", count))
    except ValueError:
        rank, count, local = -1, 0, (-1, 0)
    if not 0 <= rank < count or not 0 <= local[0] < local[1]:
        raise ConfigError(
            "RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE do not number the processes of a run",
            field="RANK",
            hint="start niss with torchrun, or unset them",
        )
    return Place(rank, count, *local) if count > 1 else None


class Ranks:
    """The processes of one run, seen from one of them; without a `place` there is just this one.

    place  which one this is
    group  of torch.distributed, that sums are made in
    store  what all ranks can write to and read from, as long as the process that holds it lives; None: nothing
    holds  whether that is this process
    """

    def __init__(
        self, place: Place | None = None, group: Any = None, store: Any = None, *, holds: bool = False
    ) -> None:
        self._place = place or Place(0, 1, 0, 1)
        self._group, self._store, self._holds = group, store, holds
        self._history, self._runs = 0.0, 0

    @property
    def count(self) -> int:
        return self._place.count

    @property
    def several(self) -> bool:
        return self.count > 1

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes the folder and reports progress."""
        return self._place.rank == 0

    @property
    def local_rank(self) -> int:
        return self._place.local_rank

    @property
    def local_count(self) -> int:
        return self._place.local_count

    def require_one(self, what: str, *, field: str) -> None:
        """Refuse something that a single process has to do."""
        if self.several:
            raise ConfigError(
                f"{what} are in one process, and there are {self.count}",
                field=field,
                hint="run it without torchrun, on one GPU or the processor",
            )

    def deal(self, loads: Sequence[int]) -> IntArray:
        """The numbers of the jobs that this rank does, in ascending order: the largest first, each to who has least."""
        if not self.several:
            return np.arange(len(loads))
        mine: list[int] = []
        ranks = [(0, rank) for rank in range(self.count)]
        for job in sorted(range(len(loads)), key=lambda number: (-loads[number], number)):
            load, rank = heapq.heappop(ranks)
            heapq.heappush(ranks, (load + loads[job], rank))
            if rank == self._place.rank:
                mine.append(job)
        return np.array(sorted(mine), dtype=np.int64)

    def seats(self, count: int) -> Seats:
        """Of so many seats without anything to train, those of this rank."""
        return Seats(count, np.arange(self._place.rank, count, self.count))

    def note(self, digest: int) -> None:
        """Remember something that all ranks must have in common; the next `pool` fails where they do not.

        digest  below 2^32
        """
        # Below 2^40, so that the sum over all ranks is a whole number that float64 holds.
        self._history = (self._history * 31.0 + digest) % 2.0**40

    def pool(self, *parts: FloatArray) -> tuple[FloatArray, ...]:
        """Each of these vectors summed over all ranks: the same bits on all of them, and in every repetition."""
        if not self.several:
            return parts
        import torch
        from torch import distributed

        buffer = np.concatenate([[self._history], *parts], dtype=np.float64)
        tensor = torch.from_numpy(buffer)
        # A sum made by everyone need not have the same bits everywhere: rank 0 makes it, and sends it out.
        self._wait(lambda: distributed.reduce(tensor, 0, group=self._group, async_op=True))
        self._wait(lambda: distributed.broadcast(tensor, 0, group=self._group, async_op=True))
        if buffer[0] != self.count * self._history:
            raise RanksError(
                "the ranks do not train the same clients from the same weights",
                hint="run the same niss on machines of the same kind",
            )
        return tuple(np.split(buffer[1:], np.cumsum([part.size for part in parts])[:-1]))

    def from_first(self, content: bytes) -> bytes:
        """What rank 0 gives here."""
        return self._from_rank(0, content)

    def from_all(self, content: bytes) -> list[bytes]:
        """What each rank gives here."""
        return [self._from_rank(rank, content) for rank in range(self.count)]

    def _from_rank(self, rank: int, content: bytes) -> bytes:
        if not self.several:
            return content
        import torch
        from torch import distributed

        mine = rank == self._place.rank
        size = torch.tensor([len(content) if mine else 0])
        self._wait(lambda: distributed.broadcast(size, rank, group=self._group, async_op=True))
        if not size.item():
            return b""
        data = np.frombuffer(content, dtype=np.uint8).copy() if mine else np.empty(int(size), dtype=np.uint8)
        self._wait(
            lambda: distributed.broadcast(torch.from_numpy(data), rank, group=self._group, async_op=True)
        )
        return data.tobytes()

    def _wait(self, begin: Any) -> None:
        """Begin something that all ranks do together and wait for it, open to signals; a rank that is gone ends it."""
        try:
            work, pause, asked = begin(), 1e-4, time.monotonic()
            while not work.is_completed():
                time.sleep(pause)
                pause = min(1.2 * pause, 5e-3)
                if self._store is not None and time.monotonic() > asked + _ASKING:
                    asked = time.monotonic()
                    if self._store.check([self._key("over")]):
                        raise self.lost("another rank has failed")
            work.wait()
        except RuntimeError as error:
            raise self.lost(f"the ranks lost each other: {str(error).partition(chr(10))[0]}") from None

    def lost(self, reason: str, *, missing: int = 1) -> RanksError:
        """The error for a rank that is gone: which one, as far as the others can tell; else it says the `reason`.

        missing  so many may be gone: the others are waited for, but not for long
        """
        try:
            seen = self._checked_in(missing)
        except Exception:  # the store went with the process that held it
            seen = dict.fromkeys(range(1, self.count), "")
        gone = sorted(set(range(self.count)) - set(seen))
        failed = {rank: said for rank, said in sorted(seen.items()) if said}
        if failed:
            message = "; ".join(f"rank {rank} failed: {said}" for rank, said in failed.items())
        elif len(gone) == 1:
            message = f"rank {gone[0]} died or cannot be reached"
        elif gone:
            message = f"of the ranks {', '.join(map(str, gone))} at least one died or cannot be reached"
        else:
            message = reason
        error = RanksError(message)
        # Whoever comes first among those that are left says it.
        error.told_elsewhere = min(seen) != self._place.rank
        return error

    def fail(self, error: BaseException) -> None:
        """Tell the others why this rank leaves; of an error that rank 0 has too, rank 0 tells the user."""
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        if isinstance(error, NissError):
            text = error.message
        if isinstance(error, KeyboardInterrupt):
            text = "it was interrupted"
        with contextlib.suppress(Exception):
            self._store.set(self._left(self._place.rank), text)
            self._store.set(self._key("over"), "")
            if not self.first and isinstance(error, NissError):
                error.told_elsewhere = self._wait_for([self._left(0)], 1.0)
            self._store.set(self._informed(self._place.rank), "")
            self._linger(range(self.count))

    def begin(self) -> Ranks:
        """Another run: what was said of an earlier one, which all may have ended alike, does not count any more."""
        self._runs += 1
        return self

    def _linger(self, ranks: Iterable[int]) -> None:
        """Where this process holds the store, stay until these ranks have read there why they end."""
        if self._holds:
            self._wait_for([self._informed(rank) for rank in ranks if rank != self._place.rank], _LINGER)

    def _wait_for(self, keys: list[str], seconds: float) -> bool:
        """Whether all these keys are in the store before so many seconds have passed."""
        until = time.monotonic() + seconds
        while keys and not self._store.check(keys):
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True

    def _checked_in(self, missing: int) -> dict[int, str]:
        """The ranks that are still there or have said why not, with what they said."""
        if self._store is None:
            return dict.fromkeys(range(self.count), "")
        mine = self._left(self._place.rank)
        if not self._store.check([mine]):
            self._store.set(mine, "-")
            self._store.set(self._key("over"), "")
        seen: dict[int, str] = {}
        until = time.monotonic() + _CHECK_IN
        while len(seen) < self.count - missing and time.monotonic() < until:
            for rank in range(self.count):
                if rank not in seen and self._store.check([self._left(rank)]):
                    said = self._store.get(self._left(rank)).decode(errors="replace")
                    seen[rank] = "" if said == "-" else said
            time.sleep(0.01)
        self._store.set(self._informed(self._place.rank), "")
        self._linger(seen)
        return seen

    def _left(self, rank: int) -> str:
        return self._key("left", rank)

    def _informed(self, rank: int) -> str:
        return self._key("informed", rank)

    def _key(self, *names: str | int) -> str:
        return "/".join(map(str, (self._runs, *names)))


ALONE = Ranks()
"""One process that does everything."""

_joined: Ranks | None = None


@contextlib.contextmanager
def joined(folder: str | Path | None = None) -> Iterator[Ranks]:
    """The ranks of the run that this process takes part in, as the environment says; `ALONE` without any.

    folder  of the run, for the hint of a `RanksError`, which is raised where another rank is gone
    """
    place = place_in(os.environ)
    if place is None:
        yield ALONE
        return
    again = (
        "start it again"
        if folder is None
        else f"every whole round is kept. Go on with: niss run --resume {folder}"
    )
    ranks = None
    try:
        with _terminated_by_exception():
            ranks = _join(place).begin()
            yield ranks
    except _Terminated:
        if ranks is None:
            raise RanksError("told to end before all ranks were there", hint=again) from None
        error = ranks.lost("told to end (SIGTERM)", missing=0)
        error.hint = again
        raise error from None
    except BaseException as error:
        if isinstance(error, RanksError):
            error.hint = error.hint or again
        elif ranks is not None:
            ranks.fail(error)
        raise


def _join(place: Place) -> Ranks:
    """Meet the others, once in the life of a process."""
    global _joined
    if _joined is not None:
        return _joined
    from torch import distributed

    wait = timedelta(seconds=_timeout())
    environment = os.environ
    try:
        if distributed.is_initialized():
            _joined = Ranks(place, distributed.new_group(backend="gloo", timeout=wait))
            return _joined
        # torchrun holds the store itself, so that it outlives every rank; a restart of all ranks begins afresh in it.
        held = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        restart = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        held_here = place.rank == 0 and not held
        server = distributed.TCPStore(  # type: ignore[attr-defined]
            host, port, place.count, held_here, timeout=wait, wait_for_workers=False
        )
        store = distributed.PrefixStore(f"niss/{restart}", server)  # type: ignore[attr-defined]
        distributed.init_process_group(
            "gloo", store=store, rank=place.rank, world_size=place.count, timeout=wait
        )
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"MASTER_ADDR and MASTER_PORT say where rank 0 is: {error}",
            field="MASTER_ADDR",
            hint="start niss with torchrun",
        ) from None
    except RuntimeError as error:
        raise RanksError(f"the {place.count} ranks did not meet: {str(error).splitlines()[0]}") from None
    atexit.register(_leave)
    _joined = Ranks(place, store=store, holds=held_here)
    return _joined


def _leave() -> None:
    from torch import distributed

    with contextlib.suppress(Exception):
        distributed.destroy_process_group()


def _timeout() -> float:
    given = os.environ.get("NISS_RANK_TIMEOUT", "")
    try:
        seconds = float(given) if given else TIMEOUT
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < 1e6:
        raise ConfigError(f"must be seconds, not {given!r}", field="NISS_RANK_TIMEOUT")
    return seconds


class _Terminated(BaseException):
    """SIGTERM: launchers send it to the ranks that are left when one has died."""


@contextlib.contextmanager
def _terminated_by_exception() -> Iterator[None]:
    """Let SIGTERM end this block by an exception, once, so that there is time to say why; only in the main thread."""

    def end(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise _Terminated

    try:
        before = signal.signal(signal.SIGTERM, end)
    except ValueError:
        yield
        return
    try:
        yield
    except BaseException:
        # What is said about the end is said in peace; launchers give half a minute.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise
    signal.signal(signal.SIGTERM, before)


def require_same(ranks: Ranks, **facts: Any) -> dict[str, list[Any]]:
    """The facts of all ranks by name; raises `ConfigError` where some have others than rank 0.

    A fact whose name begins with `own_` may differ.
    """
    found = [json.loads(one) for one in ranks.from_all(json.dumps(facts).encode())]
    for rank, one in enumerate(found):
        other = [name for name in facts if not name.startswith("own_") and one[name] != found[0][name]]
        if other:
            raise ConfigError(
                f"rank {rank} has another {', '.join(other)} than rank 0: {one[other[0]]}, not {found[0][other[0]]}",
                hint="all ranks need the same settings, data, kind of device and version of niss",
            )
    return {name: [one[name] for one in found] for name in facts}
