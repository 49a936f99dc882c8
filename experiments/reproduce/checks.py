"""Do the result files bear themselves out? What can be computed again is; the rest must fit together.

Everything here starts from the numbers in the files and from the design; no run is repeated, and nothing of the package
is asked for an epsilon (`promises`). A `Fault` says what is wrong and where.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from experiments.reproduce import design, paper
from experiments.reproduce.design import COMPARING, TUNING, Choice, Contestant
from experiments.reproduce.paper import FIGURE_4
from experiments.reproduce.promises import TRAINING_IMAGES, attack_faults, panel_faults, promise_faults
from experiments.reproduce.results import AnyCell, Attempt, Cell, Leaks, Record, Result, read_results
from experiments.reproduce.tuning import beginning, chosen, next_trials, searches_in, trials_of
from niss.errors import NissError

PANELS = (paper.FIGURE_3, paper.SWEEP)
TEST_IMAGES = 10_000
COPIED, NEARLY_ALL = 0.3, 0.9
"""The part of two curves that may agree to the last digit: runs of different seeds agree in a few rounds by chance, and
on a few hundred test records in most of them."""


@dataclass(frozen=True)
class Fault:
    """Something that does not add up. `kind`: cells, settings, accuracy, seeds, noise, epsilon, tuning, attack, ..."""

    kind: str
    where: str
    detail: str


def check_files(folder: Path, *, partial: bool = False) -> list[Fault]:
    """Every fault of the result files in `folder`; `partial`: not all that the design lists has been run."""
    found = {experiment: read_results(folder, experiment) for experiment in design.EXPERIMENTS}
    records = [one for results in found.values() for one in results.values()]
    faults = [] if partial else list(_complete(folder, records))
    for record in records:
        try:
            for fault in _faults(record, found[TUNING].get(record.name)):
                faults.append(fault)  # one by one: what was found before a crash counts
        except (NissError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            # A file in which a check does not find its way about is at fault itself.
            faults.append(Fault("cells", _where(record), f"cannot be made out: {error!r}"))
    try:
        return [*faults, *_copies_elsewhere(records)]
    except (NissError, LookupError, TypeError):
        return faults  # files that cannot be made out are among them


def _faults(record: Record[Any], tuned: Result | None) -> Iterator[Fault]:
    """All that is wrong with a file by itself, and beside the search that its choices come from."""
    yield from _identities(record)
    if record.experiment == FIGURE_4:
        yield from _attacks(record)
        return
    yield from _curves(record)
    yield from _copies(record)
    yield from _differences(record, _wanted_base(record))
    wrong = panel_faults(record) if record.experiment in PANELS else promise_faults(record)
    yield from (Fault(kind, _where(record, cell), detail) for cell, kind, detail in wrong)
    if record.experiment == TUNING:
        yield from _search(record)
    elif record.experiment in COMPARING:
        yield from _choices(record, tuned)


def _where(record: Record[Any], cell: str = "") -> str:
    return f"{record.experiment}/{record.name}" + (f": {cell}" if cell else "")


def _complete(folder: Path, records: Iterable[Record[Any]]) -> Iterator[Fault]:
    found = {(record.experiment, record.name): record for record in records}
    wanted = design.expected_cells()
    for experiment, name in wanted.keys() - found.keys():
        yield Fault("cells", f"{experiment}/{name}", "the file is missing")
    for (experiment, name), record in found.items():
        if (experiment, name) not in wanted:
            yield Fault("cells", f"{experiment}/{name}", "the design has no such file")
        elif (cells := wanted[experiment, name]) is not design.SEARCHED:
            ids = {cell.id for cell in record.cells}
            for kind, different in (("is missing", cells - ids), ("is not in the design", ids - cells)):
                yield from (Fault("cells", _where(record, cell), kind) for cell in sorted(different))
    # Files that hold another experiment than the one whose folder they are in hide behind it.
    for path in sorted(folder.glob("*/*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if (content["experiment"], content["name"]) != (path.parent.name, path.stem):
            yield Fault("cells", f"{path.parent.name}/{path.stem}", "the file says that it is another one")


def _identities(record: Record[Any]) -> Iterator[Fault]:
    """A cell's id follows from its labels, and no two cells have the same."""
    for cell, count in Counter(cell.id for cell in record.cells).items():
        if count > 1:
            yield Fault("cells", _where(record, cell), f"is there {count} times")
    for cell in record.cells:
        if cell.id != _identity(record.experiment, cell.labels):
            yield Fault("settings", _where(record, cell.id), "its labels say that it is another cell")


def _identity(experiment: str, labels: Mapping[str, Any]) -> str:
    if experiment in PANELS:
        return paper.panel_cell(labels["reading"], labels["x"], labels["seed"])
    if experiment == FIGURE_4:
        return f"{labels['noise']}/{labels['level']}/seed-{labels['seed']}"
    return design.trial_cell(labels) if experiment == TUNING else design.run_cell(labels)


def _wanted_base(record: Record[Any]) -> Mapping[str, Any]:
    """What a file should say of its settings, by its name; of data that nobody can know, what it says."""
    base = record.base
    if record.experiment in PANELS:
        return paper.find_panel(record.name).base if base["dataset"] in TRAINING_IMAGES else base
    if record.experiment == design.DEMOS:
        return design.demo(record.name)[0]
    setting = design.setting_of(record.name, base)
    known = TRAINING_IMAGES.get(setting.dataset)
    if known is None and setting.model == "mlp":
        return base
    wanted = setting.base
    if record.experiment == TUNING:
        # Who owns samples keeps a whole number of them, so that how many are held out follows from the data.
        held = round(known / 6) if known else base["held_out"]
        records = setting.images - held if setting.batch else (known or 0) - held
        wanted = {**setting.cut_to(records).base, **setting.held_out_base(held)}
    if "majority" in base:
        wanted |= {name: base[name] for name in ("tested", "majority")}
    return wanted


def _differences(record: Record[Any], wanted: Mapping[str, Any]) -> Iterator[Fault]:
    """Between what a file and its runs say of their settings, and what they should."""
    for name in sorted({*record.base, *wanted}):
        if record.base.get(name) != wanted.get(name):
            detail = f"{name} is {record.base.get(name)!r}, by its name {wanted.get(name)!r}"
            yield Fault("settings", _where(record), detail)
    if "majority" in record.base:
        tested = record.base["tested"]
        guessed = record.base["majority"] * tested
        if tested < 1 or not 0.0 < guessed < tested or abs(guessed - round(guessed)) > 1e-6:
            detail = f"{record.base['majority']} is no part of {tested:,} labels"
            yield Fault("settings", _where(record), detail)
    for cell in record.cells if record.experiment in COMPARING else ():
        variant = design.VARIANTS[cell.labels["variant"]]
        for name in ("rho", "dropout", "mode"):
            if cell.labels[name] != (value := getattr(variant, name)):
                detail = f"{name} is {cell.labels[name]!r}, of its variant {value!r}"
                yield Fault("settings", _where(record, cell.id), detail)
    named = {word for model, word in _ENGINES.items() if model != record.base.get("model", "mlp")}
    for cell in record.cells:
        if any(word in cell.engine for word in named):
            yield Fault(
                "settings", _where(record, cell.id), f"ran on an engine for another model: {cell.engine}"
            )


_ENGINES = {"mlp": "MLP in", "cnn": "CNN in", "gru": "Recurrent", "resnet": "ResNet"}
"""By the model of a file: the word that the engine of a run has for it, if any."""


def _curves(result: Result) -> Iterator[Fault]:
    """The accuracy is the end of the curve, the curve has a point for each round, in whole test images."""
    images = result.base.get("tested") or result.base.get("held_out", TEST_IMAGES)
    dataset = result.base["dataset"]
    for cell in result.cells:
        where = _where(result, cell.id)
        if not cell.curve or cell.accuracy != cell.curve[-1][1]:
            yield Fault("accuracy", where, f"{cell.accuracy} is not the end of its curve")
        if cell.rounds != result.base["rounds"]:
            yield Fault("accuracy", where, f"has {cell.rounds} rounds instead of {result.base['rounds']}")
        every = result.base.get("evaluate_every", 1)
        if [at for at, _ in cell.curve] != list(range(every, cell.rounds + 1, every)):
            yield Fault("accuracy", where, "its curve does not have every round once")
        for at, value in cell.curve:
            hits = value * images
            whole = dataset in TRAINING_IMAGES or "tested" in result.base
            if not 0.0 <= value <= 1.0 or (whole and abs(hits - round(hits)) > 1e-6):
                yield Fault("accuracy", where, f"{value} in round {at} is no part of {images:,} images")


def _copies(result: Result) -> Iterator[Fault]:
    """No curve is another's, unless both are of one seed and nothing was left of the noise in either."""
    cells = [cell for cell in result.cells if len(cell.curve) == result.base["rounds"]]
    if len(cells) < 2:
        return
    values = np.array([[accuracy for _, accuracy in cell.curve] for cell in cells])
    if values.shape[1] < 10:
        return  # a few rounds agree by chance
    most = COPIED if result.base.get("tested", TEST_IMAGES) >= 1000 else NEARLY_ALL
    for number, cell in enumerate(cells[:-1]):
        same = (values[number + 1 :] == values[number]).mean(axis=1)
        for other in np.flatnonzero(same > COPIED) + number + 1:
            twin = cells[int(other)]
            part = float(same[other - number - 1])
            if part > most and not _may_agree(cell, twin, part, most == NEARLY_ALL):
                yield Fault("seeds", _where(result, cell.id), f"has the curve of {twin.id}")


def _may_agree(one: Cell, other: Cell, part: float, few: bool) -> bool:
    """Runs of one seed without noise in the sum; trials whose rate times clip is the same agree in many rounds.

    On a few hundred records, runs of one method and seed whose noise is nearly as large agree everywhere.
    """
    if one.labels.get("seed") != other.labels.get("seed"):
        return False
    bare = max(one.aggregate_variance, other.aggregate_variance) < 1e-12
    alike = part > NEARLY_ALL and one.labels["method"] == other.labels["method"] and few
    return bare or alike or ("seed" not in one.labels and part < 0.6)


def _copies_elsewhere(records: Iterable[Record[Any]]) -> Iterator[Fault]:
    """Curves are in several files only where those have the same run; such a run is then the same in all of them."""
    by_curve, by_run = defaultdict(list), defaultdict(list)
    for record in records:
        for cell in record.cells:
            run = _run(record, cell)
            by_curve[cell.course].append((run, record, cell))
            by_run[run].append((record, cell))
    for twins in by_curve.values():
        first, record, cell = twins[0]
        for run, place, twin in twins[1:]:
            long = isinstance(cell, Attempt) or len(cell.curve) >= 10
            if place is not record and run != first and long:
                yield Fault("seeds", _where(place, twin.id), f"has the curve of {_where(record, cell.id)}")
    for same in by_run.values():
        record, cell = same[0]
        for place, twin in same[1:]:
            if twin.course != cell.course:
                detail = f"is the run {_where(record, cell.id)} and has another curve"
                yield Fault("seeds", _where(place, twin.id), detail)


def _run(record: Record[Any], cell: AnyCell) -> str:
    """What tells a run apart, whichever experiment it was made for."""
    labels = {name: value for name, value in cell.labels.items() if name not in ("reading", "tuned_for")}
    if record.experiment in PANELS:
        # Noise that cancels is the same run whatever its size.
        sigma = f"{labels.pop('sigma_k'):.6g}" if labels["x"] else ""
        return f"panel {record.name} {sigma} {sorted(labels.items())}"
    if record.experiment in (*COMPARING, design.DEMOS):
        return f"run {record.name} {sorted(labels.items(), key=str)}"
    return f"{record.experiment} {record.name} {cell.id}"


def _choices(result: Result, tuned: Result | None) -> Iterator[Fault]:
    """Every run has the choice that was best on the held-out images."""
    setting = design.setting_of(result.name, result.base)
    for cell in result.cells:
        choice, tuned_for = chosen(tuned, setting, Contestant.of(cell.labels))
        wanted = {**asdict(choice), "tuned_for": tuned_for}
        said = {name: cell.labels[name] for name in wanted}
        if said != wanted:
            yield Fault("tuning", _where(result, cell.id), f"runs with {said}; the trials say {wanted}")


def _search(result: Result) -> Iterator[Fault]:
    """The search is played again from its trials: nothing is missing, and nothing was tried beyond it."""
    setting = design.setting_of(result.name, result.base)
    for one in searches_in(result):
        search, trials = setting.search.of(one.method), trials_of(result, setting, one)
        where = _where(result, f"{one.variant.name}/{one.method.name}/epsilon={one.epsilon or 0.0:g}")
        if not trials.keys() <= set(search.choices()):
            yield Fault("tuning", where, "was tried with choices that are not in the grid")
            continue
        start, played = beginning(result, setting, one), dict[Choice, float]()
        while wanted := next_trials(search, start, played):
            if missing := [choice for choice in wanted if choice not in trials]:
                yield Fault("tuning", where, f"{missing[0]} was not tried")
                break
            played |= {choice: trials[choice] for choice in wanted}
        else:
            if beyond := trials.keys() - played.keys():
                yield Fault("tuning", where, f"{len(beyond)} trials are no part of the search")


def _attacks(leaks: Leaks) -> Iterator[Fault]:
    """Scores of an attack fit together, and a search never gets worse."""
    yield from (Fault(kind, _where(leaks, cell), detail) for cell, kind, detail in attack_faults(leaks))
    for cell in leaks.cells:
        where = _where(leaks, cell.id)
        losses = [loss for _, loss in cell.losses]
        if not math.isclose(cell.loss, losses[-1], rel_tol=1e-4):
            yield Fault("attack", where, f"loss {cell.loss:.6g} is not the end of its curve")
        if cell.losses[-1][0] != cell.iterations or cell.frames[-1][0] != cell.iterations:
            yield Fault("attack", where, "its curves do not end with its last iteration")
        if any(later > earlier for earlier, later in pairwise(losses)):
            yield Fault("attack", where, "the best loss rises")
        if not math.isclose(cell.psnr, -10.0 * math.log10(cell.mse), rel_tol=1e-6):
            yield Fault("attack", where, f"PSNR {cell.psnr:.2f} dB is not that of its squared error")
        if cell.psnr != cell.frames[-1][1]:
            yield Fault("attack", where, f"PSNR {cell.psnr:.2f} dB is not that of its last frame")
        if cell.noise < 1e-9 and cell.epsilon_joint is not None:
            yield Fault("epsilon", where, "nothing is left of the noise, so there is no epsilon")
    groups: dict[str, list[Attempt]] = defaultdict(list)
    for cell in leaks.cells:
        groups[cell.id.rpartition("/")[0]].append(cell)
    for name, cells in groups.items():
        if len({cell.losses for cell in cells}) < len(cells):
            yield Fault("seeds", _where(leaks, name), "two seeds have the same losses")


def fingerprint(record: Record[Any]) -> str:
    """Of everything in a result file but how long it ran."""
    cells = [
        {name: value for name, value in vars(cell).items() if name != "seconds" and value != {}}
        for cell in record.cells
    ]
    value = [record.experiment, record.name, record.base, cells]
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
