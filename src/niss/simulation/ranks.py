"""Several processes that train one run together: who trains which clients, and what they sum over all of them.

    torchrun --nproc-per-node 4 -m niss run ...

Every process ("rank") goes through the same rounds with the same seed. It trains the clients dealt to it, bounds what
they learned and adds the noise of their seats; noise is named by seed, round and seat or edge, so whoever needs it
draws it, and an edge between two ranks is drawn by both. One sum over all ranks a round, in float64, gives everyone the
same bits, and everyone moves its copy of the model by it. Rank 0 alone has the folder of the run.

Sums go through gloo, on GPUs too: rows are summed where they were made, and one vector a rank is left. Compared with
one process only the order of summation differs; with the same number of ranks nothing does.

A rank that fails leaves the group at once, and the others end with a `RanksError`; which rank it was, and why, is said
by that rank and by the launcher. For one that hangs the others wait half an hour, as gloo does.

Ranks trust each other, and gloo's connections are neither encrypted nor authenticated: they belong on a network of
their own.
"""

from __future__ import annotations

import atexit
import contextlib
import heapq
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niss.errors import ConfigError, RanksError
from niss.simulation.uploads import Seats

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def rank_in(environment: Mapping[str, str]) -> Ranks | None:
    """What torchrun (or any launcher that sets the same variables) says; None where this is the only process."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    try:
        number, count = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local = int(environment.get("LOCAL_RANK", number)), int(environment.get("LOCAL_WORLD_SIZE", count))
    except ValueError:
        number, count, local = -1, 0, (-1, 0)
    if not 0 <= number < count or not 0 <= local[0] < local[1]:
        raise ConfigError(
            "RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE do not number the processes of a run",
            field="RANK",
            hint="start niss with torchrun, or unset them",
        )
    return Ranks(number, count, *local) if count > 1 else None


class Ranks:
    """The processes of one run, seen from one of them.

    number, count              of this process, from 0, and how many there are
    local_number, local_count  the same among those on its own machine
    several                    whether this process is not the only one
    first                      whether this is rank 0, which writes the folder and reports progress
    group                      of torch.distributed, that sums are made in; None: that of all processes
    """

    group: Any = None

    def __init__(self, number: int, count: int, local_number: int, local_count: int) -> None:
        self.number, self.count, self.several, self.first = number, count, count > 1, number == 0
        self.local_number, self.local_count = local_number, local_count
        self._history, self._has_left = 0.0, False

    def deal(self, loads: Sequence[int]) -> IntArray:
        """The numbers of the jobs that this rank does, in ascending order: the largest first, each to who has least."""
        mine: list[int] = []
        ranks = [(0, rank) for rank in range(self.count)]
        for job in sorted(range(len(loads)), key=lambda number: (-loads[number], number)):
            load, rank = heapq.heappop(ranks)
            heapq.heappush(ranks, (load + loads[job], rank))
            if rank == self.number:
                mine.append(job)
        return np.array(sorted(mine), dtype=np.int64)

    def seats(self, count: int) -> Seats:
        """Of so many seats without anything to train, those of this rank."""
        return Seats(count, np.arange(self.number, count, self.count))

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
        self._together(lambda: distributed.reduce(tensor, 0, group=self.group, async_op=True))
        self._together(lambda: distributed.broadcast(tensor, 0, group=self.group, async_op=True))
        if buffer[0] != self.count * self._history:
            raise RanksError(
                "the ranks do not train the same clients from the same weights",
                hint="run the same niss on machines of the same kind",
            )
        return tuple(np.split(buffer[1:], np.cumsum([part.size for part in parts])[:-1]))

    def from_all(self, content: bytes) -> list[bytes]:
        """What each rank gives here."""
        return [self._from_rank(rank, content) for rank in range(self.count)]

    def _from_rank(self, rank: int, content: bytes) -> bytes:
        if not self.several:
            return content
        import torch
        from torch import distributed

        mine = rank == self.number
        size = torch.tensor([len(content) if mine else 0])
        self._together(lambda: distributed.broadcast(size, rank, group=self.group, async_op=True))
        data = np.frombuffer(content, dtype=np.uint8).copy() if mine else np.empty(int(size), dtype=np.uint8)
        if data.size:
            sent = torch.from_numpy(data)
            self._together(lambda: distributed.broadcast(sent, rank, group=self.group, async_op=True))
        return data.tobytes()

    def leave(self) -> None:
        """Close the connections to the others, for good: whatever they wait for from this rank fails at once."""
        if self.several and not self._has_left:
            from torch import distributed

            self._has_left = True
            with contextlib.suppress(Exception):
                distributed.destroy_process_group(self.group)

    def _together(self, begin: Callable[[], Any]) -> None:
        """Begin something that all ranks do together and wait for it, open to signals."""
        try:
            work, pause = begin(), 1e-4
            while not work.is_completed():
                time.sleep(pause)
                pause = min(1.2 * pause, 5e-3)
            work.wait()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise RanksError(f"rank {self.number} lost another rank: {reason}") from None


ALONE = Ranks(0, 1, 0, 1)
"""One process that does everything."""

_joined: Ranks | None = None


@contextlib.contextmanager
def joined(folder: str | Path | None = None) -> Iterator[Ranks]:
    """The ranks of the run that this process takes part in, as the environment says; `ALONE` without any.

    folder  of the run, for the hint of a `RanksError`, which is raised where another rank is gone

    With an error, this process leaves the others for good: they would wait for it.
    """
    own = rank_in(os.environ)
    if own is None:
        yield ALONE
        return
    try:
        yield _join(own)
    except BaseException as error:
        if _joined is not None:
            _joined.leave()
        if isinstance(error, RanksError) and error.hint is None:
            kept = f"every whole round is kept. Go on with: niss run --resume {folder}"
            error.hint = "start it again" if folder is None else kept
        raise


def _join(own: Ranks) -> Ranks:
    """Meet the others, once in the life of a process."""
    global _joined
    if _joined is not None:
        if _joined._has_left:
            raise RanksError("this rank left the others with an earlier error", hint="start all ranks again")
        return _joined
    from torch import distributed

    try:
        if distributed.is_initialized():
            own.group = distributed.new_group(backend="gloo")
        else:
            distributed.init_process_group("gloo")
    except ValueError as error:
        raise ConfigError(
            f"MASTER_ADDR and MASTER_PORT say where rank 0 is: {error}",
            field="MASTER_ADDR",
            hint="start niss with torchrun",
        ) from None
    except RuntimeError as error:
        raise RanksError(f"the {own.count} ranks did not meet: {str(error).splitlines()[0]}") from None
    _joined = own
    atexit.register(own.leave)
    return own


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
