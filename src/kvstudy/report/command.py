"""The command lines of figures and tables, which are one: names, the study's folder, where to write."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvstudy.analysis.plan import AnalysisError
from kvstudy.report.data import StudyData

Write = Callable[[str, StudyData, Path], Any]


def command(
    name: str, what: str, kinds: Mapping[str, Any], write: Write, suffix: str
) -> Callable[[list[str] | None], int]:
    """The `main` of `kvstudy <name>`, which writes some of `kinds`, or all, into <name>s/ of the study's folder."""

    def main(argv: list[str] | None = None) -> int:
        """Command line; returns the exit code."""
        parser = argparse.ArgumentParser(prog=f"kvstudy {name}", description=what)
        parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(kinds)} (default: all)")
        parser.add_argument("--study-dir", type=Path, required=True, help="folder that holds cells.parquet")
        parser.add_argument("--results", type=Path, help="results folder (default: the study folder's parent)")
        parser.add_argument("--out-dir", type=Path, help=f"default: {name}s/ in the study folder")
        options = parser.parse_args(argv)
        out_dir = options.out_dir or options.study_dir / f"{name}s"
        names = list(kinds) if options.names in ([], ["all"]) else options.names
        try:
            unknown = [one for one in names if one not in kinds]
            if unknown:
                raise AnalysisError(f"no {name} '{unknown[0]}'; there are {', '.join(kinds)}")
            data = StudyData.load(options.study_dir, options.results)
            for one in names:
                write(one, data, out_dir)
                print(f"{one} -> {out_dir / one}{suffix}")
        except AnalysisError as error:
            print(f"kvstudy: {error}", file=sys.stderr)
            return 2
        return 0

    return main
