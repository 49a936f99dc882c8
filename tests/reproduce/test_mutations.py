"""`niss verify` computes the committed results again: whatever is changed in a copy of them is noticed.

Each mutation names the kind of check that has to notice it, so that none hides behind the fingerprints in `tables.md`
and in the figures, which notice everything.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.reproduce.beyond import run_setting
from experiments.reproduce.checks import Fault, check_files, fingerprint
from experiments.reproduce.rerun import compare, rerun, rerun_some
from experiments.reproduce.results import Result, read_result
from experiments.reproduce.text import copy_name, disagreements, figure_faults, text_faults
from support.results import keep, made_up_cell

ROOT = Path(__file__).parents[2]
BEYOND, HUNDRED = "beyond/mnist-iid-client-1000-of-6000", "beyond/mnist-iid-client-100-of-1000"
TUNING, OTHER = "tuning/mnist-iid-client-1000-of-6000", "beyond/cifar10-non-iid-client-100-of-1000"
WALK, WALKED = "tuning/mnist-iid-client-100-of-1000", "niss-carried/epsilon=1/clip=0.1/rate=0.05/hidden=64"
PANEL, SWEEP, LEAKS = "figure-3/mnist-mlp-iid", "sweep/mnist-mlp-iid", "figure-4/mnist-7"
IN_SILOS, DEMO = "silos/mnist-non-iid-record-10-silos", "demos/demo"
PAGE, TABLES = "docs/concepts/paper.md", "results/paper/tables.md"
TABLE, ALONE = "silos/breast-cancer-iid-record-5-silos", "none/alone/epsilon=1/seed-1"
TABLE_TRIALS = "tuning/breast-cancer-iid-record-5-silos"
README, TUTORIAL, OTHERS = "README.md", "docs/tutorial.md", "docs/concepts/comparison-tables.md"
PAGES = (PAGE, README, TUTORIAL, OTHERS, "docs/guides/silos.md")
RUN = "none/niss-planned/epsilon=3/seed-1"
CENTRAL = "none/central-dp/epsilon=3/seed-1"
LOCAL = "none/dp-fedavg/epsilon=3/seed-1"
SAMPLED, SHOWN_RUN = "none/central-dp-sampled/epsilon=3/seed-1", "none/niss/epsilon=3/seed-1"
TOLERATED, COLLUDED = (RUN.replace("none", one) for one in ("tolerate", "collusion"))
X_0, X_1, LEAK = "nbafl/X=0/seed-1", "nbafl/X=1/seed-1", "nbafl/niss/seed-1"
RECORD, CURATOR = (f"none/{one}/epsilon=2.93/seed-1" for one in ("niss-planned", "central-dp"))
TRIAL = "central-dp/epsilon=3/clip=0.5/rate=0.1/hidden=32"

Content = dict[str, Any]
Mutation = Callable[[Content], None]


def cell(content: Content, name: str) -> Content:
    (found,) = [one for one in content["cells"] if one["id"] == name]
    return found


def changed(name: str, field: str, change: Callable[[Any], Any]) -> Mutation:
    """One field of a cell, one of its labels, or a fact of its mechanism."""

    def apply(content: Content) -> None:
        one = cell(content, name)
        place = next(part for part in (one, one["labels"], one.get("mechanism", {})) if field in part)
        place[field] = change(place[field])

    return apply


def times(factor: float) -> Callable[[Any], Any]:
    return lambda value: factor * value


def plus(more: float) -> Callable[[Any], Any]:
    return lambda value: value + more


def to(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


def based(field: str, value: Any) -> Mutation:
    return lambda content: content["base"].update({field: value})


def copied(source: str, target: str, *fields: str) -> Mutation:
    """Some fields of one cell, put into another."""

    def apply(content: Content) -> None:
        for field in fields:
            cell(content, target)[field] = cell(content, source)[field]

    return apply


def swapped(one: str, other: str, *fields: str) -> Mutation:
    def apply(content: Content) -> None:
        first, second = cell(content, one), cell(content, other)
        for field in fields:
            first[field], second[field] = second[field], first[field]

    return apply


def without(name: str) -> Mutation:
    return lambda content: content["cells"].remove(cell(content, name))


def twice(name: str) -> Mutation:
    return lambda content: content["cells"].append(dict(cell(content, name)))


def nearly_copied(source: str, target: str) -> Mutation:
    """A copied curve with its last rounds touched up."""

    def apply(content: Content) -> None:
        curve = [list(point) for point in cell(content, source)["curve"]]
        for point in curve[-10:]:
            point[1] = round(point[1] + 0.0007, 4)
        cell(content, target).update(curve=curve, accuracy=curve[-1][1])

    return apply


def lifted(name: str, by: float, *, start: int = 0) -> Mutation:
    """The whole curve raised, its end and the accuracy with it."""

    def apply(content: Content) -> None:
        one = cell(content, name)
        one["curve"] = [[at, value + by if at > start else value] for at, value in one["curve"]]
        one["accuracy"] = one["curve"][-1][1]

    return apply


CURVE = ("accuracy", "curve")
EVERYTHING = (*CURVE, "epsilon_joint", "epsilon_marginal", "aggregate_variance")
SEED_2 = RUN.replace("seed-1", "seed-2")

IN_FILES: dict[str, tuple[str, str, Mutation]] = {
    # numbers
    "accuracy raised": ("accuracy", BEYOND, changed(RUN, "accuracy", plus(0.01))),
    "curve raised by no whole image": ("accuracy", BEYOND, lifted(RUN, 0.00733)),
    "last round raised": ("accuracy", BEYOND, lambda c: cell(c, RUN)["curve"][-1].__setitem__(1, 0.95)),
    "accuracy above one": ("accuracy", PANEL, lifted(X_0, 0.5)),
    "a round cut off": ("accuracy", BEYOND, lambda c: cell(c, LOCAL)["curve"].pop(3)),
    "rounds overstated": ("accuracy", BEYOND, changed(LOCAL, "rounds", to(60))),
    "trial's accuracy raised": ("accuracy", TUNING, changed(TRIAL, "accuracy", plus(0.05))),
    "less noise, silos": ("noise", IN_SILOS, changed(RECORD, "aggregate_variance", times(0.97))),
    "less noise, curator": ("noise", IN_SILOS, changed(CURATOR, "aggregate_variance", times(0.9))),
    "a larger batch": ("settings", IN_SILOS, based("batch", 0.2)),
    "epsilon of a record lowered": ("epsilon", IN_SILOS, changed(CURATOR, "epsilon_joint", to(2.0))),
    "epsilon lowered": ("epsilon", BEYOND, changed(CENTRAL, "epsilon_joint", to(2.0))),
    "epsilon of shared noise lowered": ("epsilon", BEYOND, changed(RUN, "epsilon_joint", to(2.8))),
    "epsilon above the promise": ("epsilon", BEYOND, changed(RUN, "epsilon_joint", to(3.01))),
    "epsilon removed": ("epsilon", BEYOND, changed(RUN, "epsilon_joint", to(None))),
    "marginal epsilon changed": ("epsilon", BEYOND, changed(RUN, "epsilon_marginal", times(1.02))),
    "an epsilon for FedAvg": ("epsilon", BEYOND, changed("none/fedavg/seed-1", "epsilon_joint", to(8.0))),
    "less noise, DP-FedAvg": ("noise", BEYOND, changed(LOCAL, "aggregate_variance", times(0.5))),
    "less noise, trusted server": ("noise", BEYOND, changed(CENTRAL, "aggregate_variance", times(0.97))),
    "less noise, shared": ("noise", BEYOND, changed(RUN, "aggregate_variance", times(0.97))),
    "more noise, tolerated dropouts": ("noise", OTHER, changed(TOLERATED, "aggregate_variance", times(1.15))),
    "less noise, colluders": ("noise", BEYOND, changed(COLLUDED, "aggregate_variance", times(0.8))),
    "less noise in the paper's figure": ("noise", PANEL, changed(X_1, "aggregate_variance", times(0.9))),
    "marginal epsilon of the paper's figure": ("epsilon", PANEL, changed(X_1, "epsilon_marginal", times(0.9))),
    "another sigma_k": ("noise", PANEL, changed(X_1, "sigma_k", times(2))),
    "a smaller clip": ("noise", BEYOND, changed(CENTRAL, "clip", times(0.5))),
    "fewer participations": ("epsilon", BEYOND, changed(CENTRAL, "participations", to(1))),
    "stronger shares": ("settings", BEYOND, changed(RUN, "kappa", times(1.1))),
    "picture less sharp": ("attack", LEAKS, changed("none/fedavg/seed-1", "psnr", plus(-40))),
    "squared error of a picture": ("attack", LEAKS, changed(LEAK, "mse", to(0.2))),
    "loss of an attack": ("attack", LEAKS, changed(LEAK, "loss", times(3))),
    "epsilon of an attacked round": ("epsilon", LEAKS, changed("nbafl/dp-fedavg/seed-1", "epsilon_joint", to(10.0))),
    # what a run recorded of itself
    "drawn half as often": ("settings", HUNDRED, changed(SAMPLED, "sampling_probability", to(0.05))),
    "fewer dropouts": ("settings", OTHER, changed(TOLERATED, "dropout", to(0.01))),
    "fewer colluders": ("settings", OTHER, changed(COLLUDED, "rho", to(0.1))),
    "half the variance predicted": ("noise", BEYOND, changed(RUN, "predicted_variance", times(0.5))),
    "exchange relabelled": ("settings", BEYOND, changed(RUN, "exchange", to("protocol"))),
    "engine of another model": ("settings", BEYOND, changed(RUN, "engine", to("cuda: ResNet vmapped, float32"))),
    "what its noise was made of deleted": ("epsilon", BEYOND, changed(RUN, "mechanism", to({}))),
    "less noise in the demo": ("noise", DEMO, changed(SHOWN_RUN, "aggregate_variance", times(0.9))),
    "epsilon of the demo lowered": ("epsilon", DEMO, changed(SHOWN_RUN, "epsilon_joint", to(2.0))),
    "an epsilon for NISS as printed": (
        "epsilon", DEMO, changed("none/niss-as-printed/epsilon=3/seed-1", "epsilon_joint", to(3.0)),
    ),
    "less noise of the largest silo alone": ("noise", TABLE, changed(ALONE, "aggregate_variance", times(0.7))),
    "a seed of the table's trials deleted": (
        "tuning", TABLE_TRIALS, without("alone/epsilon=1/clip=0.1/rate=0.25/hidden=0/seed-2"),
    ),
    "fewer rounds in the demo": ("settings", DEMO, based("rounds", 20)),
    # deletions, and what is too much
    "a cell deleted": ("cells", BEYOND, without(SEED_2)),
    "a seed of the paper's figure deleted": ("cells", PANEL, without("nbafl/X=0.6/seed-3")),
    "a trial deleted": ("tuning", TUNING, without("dp-fedavg/epsilon=3/clip=0.05/rate=0.1/hidden=32")),
    "an attack deleted": ("cells", LEAKS, without("nbafl/niss/seed-2")),
    "a cell twice": ("cells", BEYOND, twice(RUN)),
    "all cells deleted": ("cells", OTHER, lambda content: content["cells"].clear()),
    "another file's name": ("cells", BEYOND, lambda content: content.update(name="mnist-non-iid-client-1000-of-6000")),
    # swaps
    "two methods swapped": ("noise", BEYOND, swapped(CENTRAL, LOCAL, *EVERYTHING)),
    "NISS and DP-FedAvg swapped by label": ("settings", BEYOND, swapped(RUN, LOCAL, "labels")),
    "two X swapped": ("noise", PANEL, swapped("nbafl/X=0.3/seed-1", X_1, *EVERYTHING)),
    "two epsilons swapped": ("noise", BEYOND, swapped(RUN, RUN.replace("=3", "=1"), *EVERYTHING)),
    "method relabelled": ("settings", BEYOND, changed(RUN, "method", to("central-dp"))),
    "runs that two experiments share swapped": ("seeds", PANEL, swapped(X_0, "nbafl/X=0/seed-2", *CURVE)),
    # copied seeds
    "a seed copied": ("seeds", BEYOND, copied(RUN, SEED_2, *CURVE)),
    "a seed copied and touched up": ("seeds", BEYOND, nearly_copied(RUN, SEED_2)),
    "a better method's curve copied": ("seeds", BEYOND, copied(CENTRAL, LOCAL, *CURVE)),
    "a seed of the sweep copied": (
        "seeds",
        SWEEP,
        copied("sigma-0.0434/X=1/seed-1", "sigma-0.0434/X=1/seed-2", *CURVE),
    ),
    "a seed of an attack copied": ("seeds", LEAKS, copied(LEAK, "nbafl/niss/seed-2", "losses", "loss")),
    # tuning
    "the tuned choice is not the best": (
        "tuning",
        TUNING,
        lifted("niss-planned/epsilon=3/clip=1/rate=0.2/hidden=32", 0.06, start=29),
    ),
    "a seed of a walk's trials deleted": ("tuning", WALK, without(f"{WALKED}/seed-2")),
    "a walk that could have gone on": ("tuning", WALK, lifted(f"{WALKED.replace('0.1/', '0.05/')}/seed-1", 0.06)),
    "another search named": ("settings", WALK, based("tuned", "at epsilon 3 on 3 seeds")),
    "no search named": ("tuning", WALK, lambda content: content["base"].pop("tuned")),
    "chosen at another epsilon": ("tuning", HUNDRED, changed(RUN, "tuned_for", to("niss-planned at epsilon 1"))),
    "an untuned rate": ("tuning", BEYOND, changed(RUN, "learning_rate", times(2))),
    "tuned for another method": ("tuning", BEYOND, changed(RUN, "tuned_for", to("central-dp at epsilon 3"))),
    # settings
    "a larger delta": ("settings", BEYOND, based("delta", 1e-4)),
    "more participants": ("settings", BEYOND, based("participants", 2000)),
    "tuned on fewer images": ("settings", TUNING, based("held_out", 5000)),
    "the other split": ("settings", OTHER, based("split", "iid")),
    "the paper's clip changed": ("settings", PANEL, based("clip", 1.0)),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with results, the pages that show them, and their figures."""
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "results" / "paper", root / "results" / "paper")
    pictures = [ROOT / "docs/images" / copy_name(one) for one in root.glob("results/paper/*.png")]
    for name in (*PAGES, *(str(one.relative_to(ROOT)) for one in pictures)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    return root


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, frozenset[Fault]]:
    """The results that mutations are made in, with the searches behind them; and what they lack of all results."""
    folder = tmp_path_factory.mktemp("few")
    wanted = {file for _, file, _ in IN_FILES.values()}
    for file in wanted | {f"tuning/{Path(file).name}" for file in wanted}:
        if (source := ROOT / "results" / "paper" / f"{file}.json").exists():
            (folder / file).parent.mkdir(exist_ok=True)
            shutil.copy(source, folder / f"{file}.json")
    found = frozenset(check_files(folder))
    assert {(fault.kind, fault.detail) for fault in found} == {("cells", "the file is missing")}
    return folder, found


@pytest.fixture
def copy(whole: Path) -> Iterator[Path]:
    """The same, put right again after each test."""
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    yield whole
    for path, content in before.items():
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)


def shown_faults(root: Path) -> list[Fault]:
    """What is wrong with figures and text."""
    folder = root / "results" / "paper"
    return [
        *figure_faults(folder, root / "docs" / "images"),
        *text_faults(folder, root),
        *(
            Fault("text", one.path.name, one.key)
            for page in PAGES
            for one in disagreements(root / page, folder)
        ),
    ]


def test_the_committed_results_bear_themselves_out(copy):
    assert check_files(copy / "results" / "paper") == []
    assert shown_faults(copy) == []


@pytest.mark.parametrize("name", IN_FILES)
def test_a_changed_result_is_noticed(few, name):
    (folder, lacking), (kind, file, mutate) = few, IN_FILES[name]
    path = folder / f"{file}.json"
    before = read_result(path)
    written = path.read_bytes()
    content = json.loads(written)
    mutate(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    try:
        found = set(check_files(folder)) - lacking
        after = read_result(path)
    finally:
        path.write_bytes(written)
    assert kind in {fault.kind for fault in found}, list(found)[:3]
    # The fingerprints in tables.md, and in the figures, notice it as well.
    assert fingerprint(after) != fingerprint(before)


def with_text(pattern: str, replacement: str, page: str = PAGE) -> Callable[[Path], None]:
    def apply(root: Path) -> None:
        path = root / page
        text = path.read_text(encoding="utf-8")
        assert re.search(pattern, text)
        path.write_text(re.sub(pattern, replacement, text, count=1), encoding="utf-8")

    return apply


def with_picture(
    name: str, change: Callable[[bytes], bytes], folder: str = "results/paper"
) -> Callable[[Path], None]:
    def apply(root: Path) -> None:
        path = root / folder / name
        path.write_bytes(change(path.read_bytes()))

    return apply


def with_stamp(name: str, field: str) -> Callable[[Path], None]:
    """Another digest in the file of stamps."""

    def apply(root: Path) -> None:
        path = root / "results" / "paper" / "figures.json"
        stamps = json.loads(path.read_text(encoding="utf-8"))
        stamps[name][field] = "0" * 64
        path.write_text(json.dumps(stamps), encoding="utf-8")

    return apply


def deleted(name: str) -> Callable[[Path], None]:
    return lambda root: (root / name).unlink()


SHOWN: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a number of the page": ("text", with_text(r"97\.5 ± 0\.0 %", "98.5 ± 0.0 %")),
    "a row of the page": ("text", with_text(r"\| MNIST, CNN, IID .*\n", "")),
    "marks of the page": ("text", with_text(r"<!-- result: figure-3 -->", "")),
    "a row of the README": ("text", with_text(r"-->85\.9 %<", "-->88.9 %<", README)),
    "what came before the last round": ("text", with_text(r"before -->86\.6 %<", "before -->87.6 %<", README)),
    "a number of the README without marks": (
        "text",
        with_text(r"<!-- result: demo\.niss -->85\.9 %<!-- end -->", "88.9 %", README),
    ),
    "a variance of the demo": ("text", with_text(r"8\.37e-5", "7.37e-5", TUTORIAL)),
    "a variance beside other systems": ("text", with_text(r"-->8\.37e-5<", "-->7.37e-5<", OTHERS)),
    "what is left of the trusted server's noise": ("text", with_text(r"-->0\.30<", "-->0.20<", TUTORIAL)),
    "who is ahead": ("text", with_text(r"0 / 3 / 3", "3 / 0 / 3")),
    "a curve in the README": (
        "figure",
        with_picture("demo-accuracy.png", lambda png: png + b"0", "docs/images"),
    ),
    "a dark figure deleted": ("figure", deleted("results/paper/rivals-dark.png")),
    "a dark figure of other results": ("figure", with_stamp("rivals-dark.png", "results")),
    "a number within a sentence": ("text", with_text(r"-->97\.1 ± 0\.1 %<", "-->97.9 ± 0.1 %<")),
    "a number of the tables": ("text", with_text(r"\(88\.4\)", "(89.4)", TABLES)),
    "a row of the tables": ("text", with_text(r"\| cifar10-resnet \| none \| central-dp .*\n", "", TABLES)),
    "a figure's stamp": ("figure", with_stamp("faults.png", "picture")),
    "all stamps deleted": ("figure", deleted("results/paper/figures.json")),
    "a figure's picture": ("figure", with_picture("noise.png", lambda png: png + b"0")),
    "a figure cut short": ("figure", with_picture("noise.png", lambda png: png[:-100])),
    "a figure deleted": ("figure", deleted("results/paper/figure-4.png")),
    "another figure in the docs": (
        "figure",
        with_picture("reproduce-noise.png", lambda png: png + b"0", "docs/images"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHOWN)
def test_what_is_shown_is_what_the_files_say(copy, name):
    kind, mutate = SHOWN[name]
    mutate(copy)
    found = shown_faults(copy)
    assert kind in {fault.kind for fault in found}, found


def test_a_figure_does_not_outlive_its_results(copy):
    """Seeds swapped between two runs of one method leave every mean as it is."""
    path = copy / "results" / "paper" / f"{HUNDRED}.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    swapped(RUN, SEED_2, *CURVE)(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    shown = {fault.where.replace("-dark", "") for fault in shown_faults(copy)}
    assert shown == {"faults.png", "tables.md", "rivals.png", "noise.png"}


def test_a_file_deleted(copy):
    (copy / "results" / "paper" / f"{OTHER}.json").unlink()
    assert Fault("cells", OTHER, "the file is missing") in check_files(copy / "results" / "paper")
    assert check_files(copy / "results" / "paper", partial=True) == []


def test_a_file_renamed(copy):
    folder = copy / "results" / "paper" / "beyond"
    name = "client-1000-of-6000.json"
    shutil.copy(folder / f"mnist-iid-{name}", folder / f"mnist-non-iid-{name}")
    assert "cells" in {fault.kind for fault in check_files(copy / "results" / "paper")}


def test_curves_that_were_swapped_are_found_by_running_again(places, small_setting):
    """No check of the numbers can tell; in the committed files the stamps of tables and figures do."""
    result = run_setting(
        small_setting, **places, epsilons=(8.0,), methods=("central-dp", "fedavg"), seeds=(1, 2), device="cpu"
    )
    for cell in result.cells:
        assert rerun(result, cell).agrees
    one, _, other, _ = result.cells
    swapped = [replace(a, curve=b.curve, accuracy=b.accuracy) for a, b in ((one, other), (other, one))]
    for cell in swapped:
        found = rerun(replace(result, cells=tuple(swapped)), cell)
        assert not found.agrees
        assert "another curve" in found.detail
    keep(places["out"], replace(result, cells=(swapped[0], *result.cells[1:2], swapped[1], result.cells[3])))
    found = list(rerun_some(places["out"], 4, most=60.0))
    assert sorted(one.agrees for one in found) == [False, False, True, True]
    assert list(rerun_some(places["out"], 3, most=0.0)) == []


def test_what_was_run_on_a_gpu_may_drift_as_seeds_do_and_no_further(small_setting):
    base = made_up_cell("x", {"seed": 1}, 0.8, engine="cuda: NVIDIA", aggregate_variance=1.0)
    others = [made_up_cell(f"{seed}", {"seed": seed}, 0.8) for seed in (2, 3)]
    record = Result("beyond", small_setting.name, small_setting.base, (base, *others))
    for accuracy, noise, agrees in ((0.81, 1.0, True), (0.85, 1.0, False), (0.81, 1.3, False)):
        again = made_up_cell("x", {"seed": 1}, accuracy, aggregate_variance=noise)
        assert compare(record, base, again)[0] is agrees
