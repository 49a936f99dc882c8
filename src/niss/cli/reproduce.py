"""`niss reproduce` and `niss verify`: the paper's experiments, which are in `experiments/` of the repository.

They are not part of the installed package. `find_checkout` looks for them; `experiments.reproduce.commands` has the
commands and what they do.
"""

from __future__ import annotations

import importlib
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typing_extensions import Doc

from niss.cli.options import argument, examples, from_options, lazy_app, option
from niss.errors import ConfigError

REPRODUCE_EXAMPLES = examples(
    "niss reproduce figure-3 --panel mnist-mlp-iid --rounds 100 --seeds 3 --device cuda",
    "niss reproduce figure-3 --panel cifar10-cnn-iid --x 0,1 --first-seed 2 --seeds 1 --stop-after 280",
    "niss reproduce figure-4 --image mnist:7,cifar10:7 --seeds 3",
    "niss reproduce beyond --setting mnist-iid-client --epsilons 3 --variant none,collusion",
    "niss reproduce merge other/results --out results/paper",
    more="What is in the result files is never run again; what was interrupted goes on where it stopped.",
)


def find_checkout() -> Path | None:
    """The root of a checkout of niss: the one that this package is installed from, or one around the current folder."""
    for start in (Path(__file__).resolve().parent, Path.cwd()):
        for folder in (start, *start.parents):
            if (folder / "experiments" / "reproduce" / "__init__.py").is_file() and _is_niss(folder):
                return folder
    return None


def _is_niss(folder: Path) -> bool:
    """Whether a folder is the root of this project: other projects may have `experiments/` too."""
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(project.get("project", {}).get("name") == "niss")


def load_experiments() -> Any:
    """The module `experiments.reproduce.commands` of the checkout. `ConfigError` where there is none."""
    root = find_checkout()
    if root is None:
        hint = "clone the repository of niss and run this command there"
        raise ConfigError("the experiments are not part of the installed package", hint=hint)
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module("experiments.reproduce.commands")


app = lazy_app(
    lambda: load_experiments().app,
    help="Run the paper's experiments, and those beyond it (in a checkout of the repository).",
    epilog=REPRODUCE_EXAMPLES,
)


@dataclass(frozen=True)
class VerifyOptions:
    """Which results to check, and which texts against them."""

    results: Annotated[Path, Doc("The folder that `niss reproduce` wrote.")] = argument(Path("results"))
    text: Annotated[
        list[Path] | None, Doc("Files whose numbers are checked; by default README.md and docs/.")
    ] = None
    partial: Annotated[
        bool,
        Doc("Results of your own: do not ask for every cell and figure, nor look into README.md and docs/."),
    ] = False
    as_json: Annotated[bool, Doc("Print the findings as JSON.")] = option(False, "--json")


@from_options(VerifyOptions)
def verify_command(options: VerifyOptions) -> None:
    """Recompute every epsilon and claim from the result files; fail if one does not hold or the text disagrees.

    Examples:
    niss verify results/
    niss verify results/ --text README.md --text docs/concepts/paper.md --json
    """
    load_experiments().verify(options.results, options.text, partial=options.partial, as_json=options.as_json)
