"""Damaged and hostile input against everything that reads what others send.

    python tests/fuzz [TARGET ...] --count 100000 --seed 1

All targets, or those named: wire, machines, terms, proposal, flower, tracker. Exits with 1 if anything was
found, with 130 after Ctrl-C. Findings are kept in build/fuzz, with the chunk that feeds them again.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `fuzz` and `support`

from fuzz.driver import fuzz, report

TARGETS = ("wire", "machines", "terms", "proposal", "flower", "tracker")


def main() -> int:
    """Feeds the targets, one after the other."""
    parser = argparse.ArgumentParser(
        prog="tests/fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="what to feed; all by default")
    parser.add_argument("--count", type=int, default=100_000, help="inputs for each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--chunk", type=int, help="only this chunk, as a finding names it")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"), help="where findings are kept")
    options = parser.parse_args()
    if unknown := set(options.targets) - set(TARGETS):
        parser.error(f"unknown target {min(unknown)!r}; there are: {', '.join(TARGETS)}")
    found = False
    for name in options.targets or TARGETS:
        target = importlib.import_module(f"fuzz.fuzz_{name}").TARGET
        tally, complete = fuzz(
            target,
            count=options.count,
            seed=options.seed,
            workers=options.workers,
            folder=options.out,
            only=options.chunk,
        )
        sys.stdout.write(report(target, tally) + "\n")
        sys.stdout.flush()
        found |= bool(tally.findings)
        if not complete:
            return 130
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
