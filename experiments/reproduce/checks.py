"""Do the result files bear themselves out? What can be computed again is; the rest must fit together.

Everything here starts from the numbers in the files and from the design; no run is repeated, and nothing of the package
is asked for an epsilon (`promises`). A `Fault` says what is wrong and where.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from experiments.reproduce.design import (
    BEYOND,
    DATASETS,
    DELTA,
    FIGURE_3,
    FIGURE_4,
    METHODS,
    SPLITS,
    SWEEP,
    TUNING,
    UNIT,
    Setting,
    find_panel,
    find_setting,
    panel_cell,
    run_cell,
    trial_cell,
)
from experiments.reproduce.expected import SEARCHED, expected_cells
from experiments.reproduce.promises import TRAINING_IMAGES, attack_faults, panel_faults, promise_faults
from experiments.reproduce.results import (
    Attempt,
    Cell,
    Leaks,
    Record,
    Result,
    all_leaks,
    read_results,
)
from experiments.reproduce.sensitivity import Setup
from experiments.reproduce.tuning import Axes, axes_for, axes_of, choice_of, chosen, next_trials, trials_of
from niss.errors import NissError

R = TypeVar("R", Result, Leaks)
TRAINED = (FIGURE_3, SWEEP, TUNING, BEYOND, DATASETS)
TEST_IMAGES = 10_000
COPIED = 0.3
"""The part of two curves that may agree to the last digit: runs of different seeds agree in a few rounds by chance."""


@dataclass(frozen=True)
class Fault:
    """Something that does not add up. `kind`: cells, settings, accuracy, seeds, noise, epsilon, tuning, attack, ..."""

    kind: str
    where: str
    detail: str


def check_files(folder: Path, *, partial: bool = False) -> list[Fault]:
    """Every fault of the result files in `folder`; `partial`: not all that the design lists has been run."""
    trained = {experiment: read_results(folder, experiment) for experiment in TRAINED}
    leaks = all_leaks(folder)
    records: list[Record[Any]] = [
        *(one for results in trained.values() for one in results.values()),
        *leaks.values(),
    ]
    faults = [] if partial else list(_complete(folder, records))
    for result in (one for results in trained.values() for one in results.values()):
        faults += _without_crash(result, lambda one: _trained_faults(one, trained))
    for one in leaks.values():
        faults += _without_crash(one, _attacks)
    try:
        return [*faults, *_copies_elsewhere(records)]
    except (NissError, LookupError, TypeError):
        return faults  # files that cannot be made out are among them


def _without_crash(record: R, check: Callable[[R], Iterable[Fault]]) -> list[Fault]:
    """What a check finds; a file in which it does not find its way about is at fault itself."""
    found: list[Fault] = []
    try:
        for fault in chain(_identities(record), check(record)):
            found.append(fault)  # one by one: what was found before a crash counts
    except (NissError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        found.append(Fault("cells", _where(record), f"cannot be made out: {error!r}"))
    return found


def _trained_faults(result: Result, trained: Mapping[str, Mapping[str, Result]]) -> Iterator[Fault]:
    yield from _curves(result)
    yield from _copies(result)
    if result.experiment in (FIGURE_3, SWEEP):
        wrong = panel_faults(result)
    else:
        wrong = promise_faults(result, trained[BEYOND].get(result.name) or trained[DATASETS].get(result.name))
    yield from (Fault(kind, _where(result, cell), detail) for cell, kind, detail in wrong)
    if result.experiment in (BEYOND, DATASETS):
        yield from _choices(result, trained[TUNING])
    if result.experiment == TUNING:
        yield from _search(result)


def _where(record: Record[Any], cell: str = "") -> str:
    return f"{record.experiment}/{record.name}" + (f": {cell}" if cell else "")


def _complete(folder: Path, records: Iterable[Record[Any]]) -> Iterator[Fault]:
    found = {(record.experiment, record.name): record for record in records}
    wanted = expected_cells()
    for experiment, name in wanted.keys() - found.keys():
        yield Fault("cells", f"{experiment}/{name}", "the file is missing")
    for (experiment, name), record in found.items():
        if (experiment, name) not in wanted:
            yield Fault("cells", f"{experiment}/{name}", "the design has no such file")
        elif (cells := wanted[experiment, name]) is not SEARCHED:
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
    if record.experiment in (TUNING, BEYOND, DATASETS):
        yield from _setting_faults(record)
    elif record.experiment in (FIGURE_3, SWEEP):
        yield from _panel_faults(record)


def _identity(experiment: str, labels: Mapping[str, Any]) -> str:
    if experiment in (FIGURE_3, SWEEP):
        return panel_cell(labels["reading"], labels["x"], labels["seed"])
    if experiment == FIGURE_4:
        return f"{labels['noise']}/{labels['level']}/seed-{labels['seed']}"
    if experiment == TUNING:
        return trial_cell(labels)
    return run_cell(labels["variant"], labels["method"], labels["epsilon"], labels["seed"])


def _panel_faults(record: Record[Any]) -> Iterator[Fault]:
    """The settings of a panel are the paper's."""
    base, paper = record.base, Setup()
    said = {
        "name": base["name"],
        "dataset": f"{base['data']['dataset']}-{base['model']['name']}",
        "split": base["data"]["split"],
        "clip": base["privacy"]["clip"],
        "epsilon": base["privacy"]["epsilon"],
        "delta": base["privacy"]["delta"],
        "rate": base["training"]["learning_rate"],
        "batch": base["training"]["batch_size"],
        "participants": base["training"]["participants"],
        "rounds": base["rounds"],
    }
    panel = find_panel(record.name)
    wanted = {
        "name": record.name,
        "dataset": f"{panel.dataset}-{panel.model}",
        "split": SPLITS[panel.split],
        "clip": paper.clip,
        "epsilon": paper.epsilon,
        "delta": paper.delta,
        "rate": paper.learning_rate,
        "batch": paper.batch_size,
        "participants": paper.participants,
        "rounds": 100,
    }
    if panel.dataset in TRAINING_IMAGES:
        yield from _differences(record, said, wanted)


def _setting_faults(record: Record[Any]) -> Iterator[Fault]:
    """The base of a setting is the one that its name stands for."""
    setting, base = setting_of(record), record.base
    known = setting.dataset in TRAINING_IMAGES
    if not known and setting.model == "mlp":
        return
    images = TRAINING_IMAGES.get(setting.dataset, 0) - base.get("held_out", 0)
    clients = setting.clients
    if setting.split != "natural":
        clients = min(clients, images // setting.images // setting.participants * setting.participants)
    wanted: dict[str, Any] = {
        "dataset": setting.dataset,
        "split": setting.split,
        "unit": UNIT,
        "clients": clients,
        "participants": setting.participants,
        "rounds": setting.rounds,
        "delta": DELTA,
        "local_epochs": setting.epochs,
        "batch_size": setting.batch_size,
        "sampling": "cyclic",
        "images_per_client": setting.images,
    }
    if record.experiment == TUNING:
        # Who owns samples keeps a whole number of them, so that how many are held out follows from the data.
        held = round(TRAINING_IMAGES[setting.dataset] / 6) if known else base["held_out"]
        wanted |= {"held_out": held, "seed": 1}
    if setting.model != "mlp":
        tested, guessed = base["tested"], base["majority"] * base["tested"]
        wanted |= {name: base[name] for name in ("tested", "majority")}
        wanted |= {"model": setting.model}
        if tested < 1 or not 0.0 < guessed < tested or abs(guessed - round(guessed)) > 1e-6:
            detail = f"{base['majority']} is no part of {tested:,} labels"
            yield Fault("settings", _where(record), detail)
    yield from _differences(record, record.base, wanted)


def _differences(record: Record[Any], said: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[Fault]:
    for name in sorted({*said, *wanted}):
        if said.get(name) != wanted.get(name):
            detail = f"{name} is {said.get(name)!r}, by its name {wanted.get(name)!r}"
            yield Fault("settings", _where(record), detail)


def setting_of(record: Record[Any]) -> Setting:
    """The setting that a file's name stands for."""
    return find_setting(record.name)


def _curves(result: Result) -> Iterator[Fault]:
    """The accuracy is the end of the curve, the curve has a point for each round, in whole test images."""
    images = result.base.get("tested") or result.base.get("held_out", TEST_IMAGES)
    dataset = result.base.get("dataset") or result.base["data"]["dataset"]
    for cell in result.cells:
        where = _where(result, cell.id)
        if not cell.curve or cell.accuracy != cell.curve[-1][1]:
            yield Fault("accuracy", where, f"{cell.accuracy} is not the end of its curve")
        if cell.rounds != result.base["rounds"]:
            yield Fault("accuracy", where, f"has {cell.rounds} rounds instead of {result.base['rounds']}")
        if [at for at, _ in cell.curve] != list(range(1, cell.rounds + 1)):
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
    for number, cell in enumerate(cells[:-1]):
        same = (values[number + 1 :] == values[number]).mean(axis=1)
        for other in np.flatnonzero(same > COPIED) + number + 1:
            twin = cells[int(other)]
            if not _may_agree(cell, twin, float(same[other - number - 1])):
                yield Fault("seeds", _where(result, cell.id), f"has the curve of {twin.id}")


def _may_agree(one: Cell, other: Cell, part: float) -> bool:
    """Runs of one seed without noise in the sum; trials whose rate times clip is the same agree in many rounds."""
    if one.labels.get("seed") != other.labels.get("seed"):
        return False
    bare = max(one.aggregate_variance, other.aggregate_variance) < 1e-12
    return bare or ("seed" not in one.labels and part < 0.6)


def _copies_elsewhere(records: Iterable[Record[Any]]) -> Iterator[Fault]:
    """Curves are in several files only where those have the same run; such a run is then the same in all of them."""
    by_curve, by_run = defaultdict(list), defaultdict(list)
    for record in records:
        for cell in record.cells:
            curve = cell.losses if isinstance(cell, Attempt) else cell.curve
            run = _run(record, cell)
            by_curve[curve].append((run, record, cell))
            by_run[run].append((curve, record, cell))
    for twins in by_curve.values():
        first, record, cell = twins[0]
        for run, place, twin in twins[1:]:
            if place is not record and run != first and _long(cell):
                yield Fault("seeds", _where(place, twin.id), f"has the curve of {_where(record, cell.id)}")
    for same in by_run.values():
        curve, record, cell = same[0]
        for other, place, twin in same[1:]:
            if other != curve:
                detail = f"is the run {_where(record, cell.id)} and has another curve"
                yield Fault("seeds", _where(place, twin.id), detail)


def _long(cell: Any) -> bool:
    return isinstance(cell, Attempt) or len(cell.curve) >= 10


def _run(record: Record[Any], cell: Any) -> str:
    """What tells a run apart, whichever experiment it was made for."""
    labels = {name: value for name, value in cell.labels.items() if name not in ("reading", "tuned_for")}
    if record.experiment in (FIGURE_3, SWEEP):
        # Noise that cancels is the same run whatever its size.
        sigma = f"{labels.pop('sigma_k'):.6g}" if labels["x"] else ""
        return f"panel {record.name} {sigma} {sorted(labels.items())}"
    if record.experiment in (BEYOND, DATASETS):
        return f"run {record.name} {sorted(labels.items(), key=str)}"
    return f"{record.experiment} {record.name} {cell.id}"


def _choices(result: Result, tuned: Mapping[str, Result]) -> Iterator[Fault]:
    """Every run has the choice that was best on the held-out images."""
    setting = setting_of(result)
    found = tuned.get(result.name)
    for cell in result.cells:
        labels = cell.labels
        # Without noise the one choice serves for every epsilon.
        wanted = chosen(found, setting, labels["method"], labels["epsilon"] or 1.0, labels["variant"])
        said = {name: labels[name] for name in asdict(wanted[0])}, labels["tuned_for"]
        if said != (asdict(wanted[0]), wanted[1]):
            detail = (
                f"runs with {said[0]} tuned for {said[1]}; the trials say {asdict(wanted[0])}, {wanted[1]}"
            )
            yield Fault("tuning", _where(result, cell.id), detail)


def _search(result: Result) -> Iterator[Fault]:
    """The search is played again from its trials: nothing is missing, and nothing was tried beyond it."""
    labels = [cell.labels for cell in result.cells]
    groups = {(one["method"], one.get("variant", "none"), one["epsilon"] or 0.0) for one in labels}
    for method, variant, epsilon in sorted(groups):
        axes = axes_for(METHODS[method], axes_of(setting_of(result)))
        trials = {
            choice_of(cell.labels, axes): cell.accuracy
            for cell in trials_of(result, method, variant)
            if (cell.labels["epsilon"] or 0.0) == epsilon
        }
        where = _where(result, f"{variant}/{method}/epsilon={epsilon:g}")
        if any(not _on(axes, choice) for choice in trials):
            yield Fault("tuning", where, "was tried with choices that are not in the grid")
        elif missing := next_trials(axes, trials):
            yield Fault("tuning", where, f"{missing[0]} was not tried")
        elif len(trials) != axes.trials:
            yield Fault("tuning", where, f"{len(trials)} trials, everyone else has {axes.trials}")


def _on(axes: Axes, choice: Any) -> bool:
    return (
        choice.clip in axes.clip
        and choice.learning_rate in axes.learning_rate
        and choice.hidden in axes.hidden
    )


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
    """Of everything in a result file but how long and on what it ran."""
    cells = [
        {
            name: value
            for name, value in vars(cell).items()
            if name not in ("seconds", "engine") and value != {}
        }
        for cell in record.cells
    ]
    value = [record.experiment, record.name, record.base, cells]
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
