"""What is left of a run: a record of each round, and `RunFolder`, which keeps them (`niss.runs.folder` reads it).

One type from the round to the page, for simulated runs and for those on Flower; neither torch nor Flower is needed. A
line of metrics.jsonl is a `RoundRecord` as JSON, whose keys are the names of its fields. JSON has no infinity: a mu
that is null is infinite, and promises nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import numpy as np
from annotated_types import Gt, Lt

from niss.errors import RunFolderError
from niss.files import (
    DIAGNOSTICS,
    MANIFEST,
    METRICS,
    TIMING,
    append_durably,
    json_line,
    prepare_run_folder,
    read_json_lines,
    to_json,
    write_atomically,
    write_json,
)

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Finite = Annotated[float, Gt(-math.inf), Lt(math.inf)]
"""Of a number in a file: JSON may hold whole ones that are too large for a float."""


def five_before(accuracies: Sequence[float]) -> float | None:
    """Mean of the five before the last, or of as many as there are; None where there is none.

    Noise that is taken out one round later is all gone after the last round alone: that one says too little.

    >>> five_before([0.1, 0.5, 0.6, 0.6, 0.7, 0.6, 0.9]), five_before([0.9])
    (0.6, None)
    """
    earlier = accuracies[-6:-1]
    return sum(earlier) / len(earlier) if earlier else None


@dataclass(frozen=True)
class SumNoise:
    """The noise in the sum of a round, in each coordinate.

    variance     of it
    covariances  with the noise in the sums of earlier rounds, the latest first; as many as are not zero
    """

    variance: float = 0.0
    covariances: tuple[float, ...] = ()

    def joined(self, following: SumNoise) -> SumNoise:
        """Of this sum and the next one, added up."""
        between, *further = following.covariances or (0.0,)
        length = max(len(self.covariances), len(further))
        with_this, with_next = (
            np.pad(values, (0, length - len(values))) for values in (self.covariances, further)
        )
        variance = self.variance + following.variance + 2.0 * between
        return SumNoise(variance, tuple((with_this + with_next).tolist()))


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """A round as its run remembers it; the same in every repetition of a simulated run.

    Who was there:
    round           of the run, counted from 1
    participants    clients that were asked for an upload
    survivors       of them, those whose upload is in the sum
    lost            by client, why its upload is not; empty where that is not told apart
    skipped         why the round did not take place; None: it did
    void            nothing was released: too few uploads arrived
    problems        what went wrong in a repair, in sentences
    blanks          of the uploads in the sum, those of clients that failed or were late, with noise of that deviation
    blanks_deviation; exact in a simulation; None: not counted

    The noise, per coordinate; None: not measured, or not known:
    exact           nothing but the intended noise was left in the sum
    uncancelled     noise shares that were left in the sum
    masked          self-masks that were left in the sum
    tau2            mean distortion of received shares
    aggregate_variance            measured, in the sum of the uploads that arrived; only a simulator can
    aggregate_variance_predicted  what it should have been
    noise           of the sum that moved the model, predicted
    model_noise_variance          in the model after the round, predicted
    carried_variance              of it, what the next round takes out; an end here would leave it there

    What it cost a client, at most, as mu of a Gaussian; infinite: there is no bound:
    mu_joint        against a server that sees everything
    mu_marginal     where its upload is looked at alone
    mu_outsider     against someone who sees nothing but the model made of the sum
    grid_delta      what rounding and the sampler add to delta; None: nothing was rounded
    balance         how unequally shares were received (`niss.accounting.Balance`), where they were

    The clip and the model:
    clip            of the round, where it moves
    below_clip      noisy fraction of the updates that it left as they were; None: nothing was released
    accuracy, loss  of the model after the round; None: it was not tested

    The exchange, where the real protocol was used:
    attempts        graphs drawn until one kept the promise
    bytes_uploaded  size of all uploads that were accepted
    public          in hex, the beacon and what it was let out for, from which the graph follows
    """

    round: int
    participants: int = 0
    survivors: int = 0
    lost: Mapping[str, str] = field(default_factory=dict)
    skipped: str | None = None
    void: bool = False
    problems: tuple[str, ...] = ()
    blanks: Finite | None = None
    blanks_deviation: Finite = 0.0
    exact: bool = True
    uncancelled: int = 0
    masked: int = 0
    tau2: Finite | None = None
    aggregate_variance: Finite | None = None
    aggregate_variance_predicted: Finite | None = None
    noise: SumNoise = SumNoise()
    model_noise_variance: Finite | None = None
    carried_variance: Finite = 0.0
    mu_joint: float = 0.0
    mu_marginal: float = 0.0
    mu_outsider: float = 0.0
    grid_delta: Finite | None = None
    balance: Mapping[str, Any] | None = None
    clip: Finite | None = None
    below_clip: Finite | None = None
    accuracy: Finite | None = None
    loss: Finite | None = None
    attempts: int = 1
    bytes_uploaded: int = 0
    public: Mapping[str, str] | None = None

    @property
    def dropped(self) -> int:
        """Clients that were asked for an upload, and of whom there is none in the sum."""
        return self.participants - self.survivors

    @property
    def unguaranteed(self) -> bool:
        """Whether the round gave somebody no guarantee at all in the joint view."""
        return not math.isfinite(self.mu_joint)

    def to_json(self) -> dict[str, Any]:
        """All fields by name, as JSON can hold them."""
        values: dict[str, Any] = to_json(asdict(self))
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any], where: object = "a round") -> RoundRecord:
        """What `to_json` gave; fields that are missing have their defaults, and unknown ones are passed over.

        Raises `RunFolderError` naming `where` and the field for a value of another type.
        """
        from pydantic import ValidationError

        plain = to_json(values)
        infinite = {name: math.inf for name in _MUS if name in plain and plain[name] is None}
        try:
            return _adapter().validate_json(json.dumps(plain | infinite), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            raise RunFolderError(
                f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg'].lower()}",
                hint="the file was changed by hand or written by another version of niss",
            ) from None


_MUS = tuple(one.name for one in fields(RoundRecord) if one.name.startswith("mu_"))


@cache
def _adapter() -> TypeAdapter[RoundRecord]:
    """Reads records; made once, since that takes longer than a record."""
    from pydantic import TypeAdapter

    return TypeAdapter(RoundRecord)


class RunFolder:
    """The folder of one run or comparison on disk, as it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, manifest: Mapping[str, Any], *, overwrite: bool = False) -> Self:
        """A fresh folder with its manifest.

        Raises `RunFolderError` where `path` is not empty, except where it is an earlier run and `overwrite` is set.
        """
        prepare_run_folder(path, overwrite=overwrite)
        write_json(path / MANIFEST, manifest)
        return cls(path)

    def append_round(self, record: RoundRecord, seconds: float) -> None:
        """Add one round's line to the metrics, on disk before this returns."""
        append_durably(self.path / METRICS, json_line(asdict(record)))
        timing = {"round": record.round, "seconds": round(seconds, 4)}
        append_durably(self.path / TIMING, json_line(timing))

    def append_diagnostics(self, number: int, zeroed_updates: int) -> None:
        """Add what follows from bare updates, with no noise on it: no server knows it, and no claim covers it."""
        diagnostics = {"round": number, "zeroed_updates": zeroed_updates}
        append_durably(self.path / DIAGNOSTICS, json_line(diagnostics))

    def rewind(self, rounds: int) -> list[RoundRecord]:
        """Drop whatever was written after the checkpoint at `rounds`; returns the records up to there."""
        names = (METRICS, TIMING, DIAGNOSTICS)
        lines = {name: read_json_lines(self.path / name)[0][:rounds] for name in names}
        if len(lines[METRICS]) < rounds:
            raise other_rounds(self.path / METRICS, len(lines[METRICS]), rounds)
        for name, rows in lines.items():
            write_atomically(self.path / name, b"".join(map(json_line, rows)))
        return [RoundRecord.from_json(line, self.path / METRICS) for line in lines[METRICS]]


def other_rounds(path: Path, rounds: int, checkpoint: int) -> RunFolderError:
    """That a file has fewer rounds than the checkpoint that a run is to go on from."""
    return RunFolderError(
        f"{path} has {rounds} rounds, but the checkpoint was made after round {checkpoint}",
        hint="the folder was changed by hand or by an older niss; start the run again in a new folder",
    )
