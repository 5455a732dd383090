"""`python -m tests.ablations [NAME...]`: plant each bug, or those named, and say which tests found
it.

Exit code 0 if every bug was found by every test that is named for it.
"""

from __future__ import annotations

import argparse
import sys

from tests.ablations.mutants import MUTANTS
from tests.ablations.runner import FAST, Mutant, Workshop

EVERYWHERE = [
    f"tests/{name}"
    for name in (
        "api",
        "cluster",
        "contracts",
        "core",
        "io",
        "mailbox",
        "network",
        "operators",
        "state",
        "task",
    )
]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.ablations", description="Plant bugs, and say which tests found them."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="name of a bug; without, all")
    parser.add_argument(
        "--everywhere",
        action="store_true",
        help="run the fast lane of the runtime for each bug, to learn which tests find it",
    )
    options = parser.parse_args(arguments)
    names, everywhere = options.names, options.everywhere
    if unknown := sorted(set(names) - {mutant.name for mutant in MUTANTS}):
        print(f"no such ablation: {', '.join(unknown)}", file=sys.stderr)
        return 2
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    with Workshop() as workshop:
        if not everywhere:
            tests = list(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
            sound = workshop.run(tests)
            if sound.failed:
                print(sound.output)
                print("these tests fail without any bug", file=sys.stderr)
                return 1
        survivors = [mutant.name for mutant in chosen if not found(workshop, mutant, everywhere)]
    print(
        f"{len(chosen) - len(survivors)} of {len(chosen)} bugs found"
        + (f"; not found: {', '.join(survivors)}" if survivors else "")
    )
    return 1 if survivors else 0


def found(workshop: Workshop, mutant: Mutant, everywhere: bool) -> bool:
    """Plant one bug, report in a line."""
    with workshop.planted(mutant):
        outcome = (
            workshop.run(EVERYWHERE, "-m", FAST, "-n", "2")
            if everywhere
            else workshop.run(mutant.tests)
        )
    if everywhere:
        print(f"{mutant.name}: {len(outcome.failed)} tests fail")
        for test in sorted(outcome.failed):
            print(f"    {test}")
        return bool(outcome.failed)
    missed = [test for test in mutant.tests if test not in outcome.failed]
    print(
        f"{mutant.name}: {'found' if not missed else 'NOT FOUND by ' + ', '.join(missed)}",
        flush=True,
    )
    return not missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
