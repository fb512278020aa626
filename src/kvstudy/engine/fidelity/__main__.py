"""`python -m kvstudy.engine.fidelity FOLDER`: a line a case; exits 1 where one disagrees, 2 where there is none."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

from kvstudy.engine.fidelity.check import check
from kvstudy.engine.fidelity.report import NEAR_TIE, TOLERANCE


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m kvstudy.engine.fidelity",
        description="Compare our H2O and InfiniGen with the authors' numbers: selections equal (but for scores within "
        f"{NEAR_TIE:g} of each other, which are reported apart), logits within {TOLERANCE:g}.",
    )
    parser.add_argument("folder", type=Path)
    args = parser.parse_args(argv)
    # Each case makes an engine, which collects garbage: not among all that was imported.
    gc.freeze()
    total = failed = 0
    try:
        for case in check(args.folder):
            print(case.line(), flush=True)
            total += 1
            failed += not case.ok
    except (OSError, KeyError, ValueError) as error:
        print(f"fidelity: {args.folder}: {error!r}", file=sys.stderr)
        return 2
    if not total:
        print(
            f"fidelity: nothing to compare in {args.folder}: no expected.safetensors below it",
            file=sys.stderr,
        )
        return 2
    print(f"{total} cases, {failed} disagree")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
