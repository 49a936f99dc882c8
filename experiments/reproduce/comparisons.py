"""Tables of the comparisons: methods at the same epsilon, silos, presets, what was tuned, and who is ahead of whom."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

from experiments.reproduce import design
from experiments.reproduce.claims import learns
from experiments.reproduce.promises import noise_in_model
from experiments.reproduce.results import (
    Cell,
    Result,
    difference,
    over_seeds,
    read_results,
    select,
    spread,
)
from experiments.reproduce.tables import MISSING, markdown, percent
from experiments.reproduce.tuning import edges_of, searches_in, trials_of, winner
from niss.claims import NO_GUARANTEE, NOT_APPLICABLE, digits, printed_claim
from niss.claims import percent as percent_of
from niss.methods import METHODS as KINDS


def both(cells: Sequence[Cell]) -> str:
    """Accuracy in percent after the last round, with its deviation over seeds, and of the five rounds before it."""
    if not cells:
        return MISSING
    before = spread([cell.before for cell in cells])
    return f"{percent(over_seeds(cells, 'accuracy')).removesuffix(' %')} ({100 * before.mean:.1f})"


def versus(one: Sequence[Cell], other: Sequence[Cell], measure: str = "accuracy") -> str:
    """The mean of paired differences in points and half its 95 % interval; bold where that does not hold 0."""
    found = difference(one, other, measure)
    if found is None:
        return MISSING
    shown = f"{100 * found.mean:+.2f} ± {100 * found.half:.2f}".replace("-", "−")
    return f"**{shown}**" if found.verdict else shown


PUBLISHED = {"mnist": 0.981}
"""By one trusted curator at this epsilon: Papernot et al. 2021."""
_IN_SILOS = {
    "No privacy": ("fedavg", "none"),
    "One curator": ("central-dp", "none"),
    "niss": ("niss-planned", "none"),
    "niss, a fifth collude": ("niss-planned", "collusion"),
    "niss, a tenth late": ("niss-planned", "late"),
    "Every silo adds all": ("dp-fedavg", "none"),
    "Largest silo alone": ("alone", "none"),
}


def silos_table(folder: Path, *, tabular: bool = False) -> str:
    """Accuracy where silos hide single records, and by how much niss is ahead of one curator who has them all."""
    rows = []
    results = read_results(folder, design.SILOS)
    for result in (results[name] for name in design.IN_SILOS if name in results):
        setting = design.find_setting(result.name)
        if (setting.dataset in design.TABULAR) == tabular:
            found = {name: select(result, method=one, variant=two) for name, (one, two) in _IN_SILOS.items()}
            row = {
                "Records": f"{setting.title}, {setting.participants} silos",
                "ε": " / ".join(f"{epsilon:g}" for epsilon in setting.epsilons),
                **{name: both(cells) for name, cells in found.items() if cells},
                "niss − curator, points": versus(found["niss"], found["One curator"]),
            }
            published = PUBLISHED.get(setting.dataset)
            rows.append(row | ({"Published, curator": f"{100 * published:.1f}"} if published else {}))
    return markdown(rows)


def in_preset_order(result: Result | None) -> list[Cell]:
    """The runs of a preset as its methods are listed there."""
    if result is None:
        return []
    listed = [design.run_cell(labels) for labels in design.demo(result.name)[1].values()]
    return sorted(result.cells, key=lambda cell: listed.index(cell.id))


def demo_table(folder: Path, name: str = "demo") -> str:
    """The comparison of a preset: what each method reached, what it promises, and whom that has to trust."""
    rows, result = [], read_results(folder, design.DEMOS).get(name)
    shown = "rounds" if result is None or result.base["evaluate_every"] == 1 else "evaluations"
    for cell in in_preset_order(result):
        method, held = design.EVERYONE[cell.labels["method"]], _claim(cell, cell.epsilon_joint)
        trusted = KINDS[method.kind].trusts.format(clients="all silos" if name == "silos" else "all clients")
        if method.trusting:
            trusted, held = f"{trusted} (ε {held} against others)", NO_GUARANTEE
        rows.append(
            {
                "Method": method.name,
                "Accuracy": percent_of(cell.accuracy),
                f"Five {shown} before": percent_of(cell.before),
                "ε against the server": held,
                "Who is trusted": NOT_APPLICABLE if method.noise == "cancelled" else trusted,
            }
        )
    return markdown(rows, words=("Who is trusted",))


def demo_noise_table(folder: Path) -> str:
    """Its shares and the noise they leave in a round and in the model, and what one upload alone would claim."""
    result = read_results(folder, design.DEMOS).get("demo")
    rows = []
    for cell in in_preset_order(result):
        assert result is not None
        facts, method = cell.mechanism, design.EVERYONE[cell.labels["method"]]
        left = [cell.aggregate_variance, facts.get("predicted_variance", 0.0)]
        if method.protects:
            unit = (cell.labels["clip"] / result.base["participants"]) ** 2
            left.append(unit * float(noise_in_model(result, cell, predicted=True)[-1]))
        else:
            left.append(0.0)
        names = ("Noise in a round, measured", "Noise in a round, predicted", "Noise in the model, predicted")
        rows.append(
            {
                "Method": method.name,
                "κ": digits(facts.get("kappa")),
                "τ²": digits(facts.get("tau2")),
                **{name: digits(value) if value else "none" for name, value in zip(names, left, strict=True)},
                "ε of one upload alone": _claim(cell, cell.epsilon_marginal),
            }
        )
    return markdown(rows)


def _claim(cell: Cell, epsilon: float | None) -> str:
    return printed_claim(epsilon) if design.EVERYONE[cell.labels["method"]].private else "not private"


_RIVAL = "dp-fedavg"
LEAD = "Ahead of DP-FedAvg, points"
_WORDS = ("Variant", "Method", "ε, joint view", LEAD, "This", "beside")
NOTE = (
    "Accuracy in percent after the last round, with its deviation over seeds, and in brackets the mean of the five "
    "rounds before it. Differences are paired by seed, with their 95 % interval by Student's t, in bold where that "
    "does not hold 0; nothing else counts as ahead or behind.\n"
)


def accuracies_table(folder: Path) -> str:
    """Every method at every epsilon promised, by setting and variant, and the epsilon that holds."""
    results, rows = as_listed(read_results(folder, design.BEYOND)), []
    for result in results:
        if guess := result.base.get("majority"):
            said = {"Setting": result.name, "Variant": "none", "Method": "most frequent label"}
            guesses = {f"ε = {epsilon:g}": f"{100 * guess:.1f}" for epsilon in design.EPSILONS}
            rows.append(said | guesses | {"ε, joint view": "–", LEAD: "–"})
        for variant, method in product(design.VARIANTS, design.METHODS):
            if cells := select(result, method=method, variant=variant):
                said = {"Setting": result.name, "Variant": variant, "Method": method}
                rows.append(said | _by_epsilon(result, method, cells))
    return f"{NOTE}\n{tuned_where(folder)}\n{markdown(rows, words=_WORDS)}"


def _by_epsilon(result: Result, method: str, cells: Sequence[Cell]) -> dict[str, str]:
    """The accuracies of a method at each epsilon, the epsilon that is held, and the lead."""
    row, leads = {}, []
    for epsilon in design.EPSILONS:
        mine, local = at_epsilon(cells, epsilon), select(result, method=_RIVAL, epsilon=epsilon)
        found = over_seeds(mine, "accuracy")
        nothing = found is not None and not learns(found, result)
        row[f"ε = {epsilon:g}"] = both(mine) + ", **nothing learned**" * nothing
        leads.append(versus(mine, local))
    lead = "–" if method == _RIVAL else " / ".join(leads)
    return row | {"ε, joint view": epsilon_of_runs(cells), LEAD: lead}


def tuned_where(folder: Path) -> str:
    """How the methods of each setting were tuned, and where they run with what was chosen at another epsilon."""
    found = defaultdict(list)
    for result in as_listed(read_results(folder, design.BEYOND)):
        setting = design.setting_of(result.name, result.base)
        others = [f"{epsilon:g}" for epsilon in setting.epsilons if epsilon not in setting.search.epsilons]
        elsewhere = f"; at epsilon {' and '.join(others)} they have what was chosen there" if others else ""
        found[f"{setting.search.words}, run with {len(setting.seeds)}{elsewhere}"].append(f"`{result.name}`")
    return "".join(f"- Tuned {words}: {', '.join(names)}.\n" for words, names in found.items())


PAIRS = (
    ("niss-planned", "dp-fedavg"),
    ("niss-planned", "central-dp"),
    ("niss-planned", "secagg-ddg"),
    ("niss-carried", "niss-planned"),
    ("niss-carried", "central-dp"),
    ("niss-carried", "central-mf"),
    ("niss-carried", "central-dp-sampled"),
)
_MEASURES = {"accuracy": "last round", "before": "five before"}


def _compared(folder: Path) -> Iterator[tuple[Result, str, str, float, list[Cell], list[Cell]]]:
    """Every pair of methods in every setting at every epsilon, without faults."""
    results = as_listed(read_results(folder, design.BEYOND))
    for result, (one, other), epsilon in product(results, PAIRS, design.EPSILONS):
        left, right = (select(result, method=name, epsilon=epsilon, variant="none") for name in (one, other))
        if left and right:
            yield result, one, other, epsilon, left, right


def differences_table(folder: Path) -> str:
    """Paired differences in points, at the last round and on average over the five before."""
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for result, one, other, epsilon, left, right in _compared(folder):
        said = {"Setting": result.name, "This": one, "beside": other}
        row = rows.setdefault((result.name, one, other), said)
        for measure, words in _MEASURES.items():
            row[f"ε = {epsilon:g}, {words}"] = versus(left, right, measure)
    return markdown(list(rows.values()), words=_WORDS)


def verdicts_table(folder: Path) -> str:
    """Who is ahead by the interval of a paired difference, in how many of the settings tuned at that epsilon."""
    counts: dict[tuple[str, str, str], Counter[tuple[float, str]]] = {}
    for result, one, other, epsilon, left, right in _compared(folder):
        tuned = epsilon in design.setting_of(result.name, result.base).search.epsilons
        for measure, words in _MEASURES.items():
            if tuned and (lead := difference(left, right, measure)):
                counts.setdefault((one, other, words), Counter())[epsilon, lead.verdict] += 1
    rows = []
    for (one, other, words), found in counts.items():
        row = {"This": f"`{one}`", "beside": f"`{other}`", "Accuracy": words}
        for epsilon in design.EPSILONS:
            ahead, behind, neither = (found[epsilon, verdict] for verdict in ("ahead", "behind", ""))
            if ahead + behind + neither:
                row[f"ε = {epsilon:g}"] = f"{ahead} / {behind} / {neither}"
        rows.append(row)
    return markdown(rows, words=("beside", "Accuracy"))


def as_listed(results: Mapping[str, Result]) -> list[Result]:
    """Settings as they are listed, others behind them."""
    known = [name for name in (*design.COMPARED, *design.IN_SILOS) if name in results]
    return [results[name] for name in (*known, *sorted(results.keys() - set(known)))]


def at_epsilon(cells: Sequence[Cell], epsilon: float) -> list[Cell]:
    return [cell for cell in cells if cell.labels["epsilon"] in (None, epsilon)]


def epsilon_of_runs(cells: Sequence[Cell]) -> str:
    """The largest epsilon of the joint view over the seeds, for each one promised."""
    method = design.METHODS[cells[0].labels["method"]]
    if not method.private:
        return "not private"
    if any(cell.epsilon_joint is None for cell in cells):
        return "none is finite"
    promised = sorted({cell.labels["epsilon"] for cell in cells})
    held = [max(cell.epsilon_joint or 0.0 for cell in at_epsilon(cells, epsilon)) for epsilon in promised]
    trusted = ", server trusted" if method.trusting else ""
    return " / ".join(f"{epsilon:.2f}" for epsilon in held) + trusted


def tuning_table(folder: Path) -> str:
    """What the search chose for each method at each epsilon."""
    rows = []
    for result in as_listed(read_results(folder, design.TUNING)):
        setting = design.setting_of(result.name, result.base)
        for one in searches_in(result):
            trials, under = trials_of(result, setting, one), one.variant.name
            if not trials:
                continue  # begun, and none of its trials has all seeds
            best = winner(one, trials)
            rows.append(
                {
                    "Setting": result.name,
                    "Method": one.method.name if under == "none" else f"{one.method.name}, {under}",
                    "ε": f"{one.epsilon:g}" if one.epsilon else "–",
                    "Trials × seeds": f"{len(trials)} × {len(setting.search.seeds)}",
                    "Clip": f"{best.clip:g}" if one.method.private else "–",
                    "Rate": f"{best.learning_rate:g}",
                    "Hidden": f"{best.hidden}",
                    "Held-out accuracy": f"{trials[best]:.1%}",
                    "On the edge": ", ".join(edges_of(trials, best)) or "–",
                }
            )
    return markdown(rows, words=("Method", "On the edge"))


def learned_words(folder: Path) -> str:
    """A line for each setting: how large it is, and who learns nothing in it."""
    lines = []
    for result in as_listed(read_results(folder, design.BEYOND)):
        setting, failing = design.find_setting(result.name), []
        if "majority" not in result.base:
            continue
        for epsilon in design.EPSILONS:
            found = {
                method: over_seeds(select(result, method=method, epsilon=epsilon, variant="none"), "accuracy")
                for method in design.METHODS
                if design.METHODS[method].private
            }
            known = {method: one for method, one in found.items() if one is not None}
            names = [method for method, one in known.items() if not learns(one, result)]
            if names:
                everyone = "by any private method" if len(names) == len(known) else "by " + ", ".join(names)
                failing.append(f"at ε = {epsilon:g} {everyone}")
        private = "; ".join(failing)
        verdict = f"Nothing is learned {private}." if failing else "Every private method learns something."
        plain = over_seeds(select(result, method="fedavg", variant="none"), "accuracy")
        if plain is not None and not learns(plain, result):
            verdict = "Not even FedAvg learns anything in so few rounds. " + verdict
        lines.append(
            f"- **{setting.title}**, {setting.participants:,} of {setting.clients:,} clients a round, "
            f"{setting.rounds} rounds: the most frequent label is right {100 * result.base['majority']:.1f} % of the "
            f"time. {verdict}\n"
        )
    return "".join(lines) or MISSING + "\n"
