"""Claims of the field, decided by data: supported, contradicted, inconclusive, or not testable here.

A claim is a YAML entry in `conf/claims/`: its statement, its source, and predicates over measured cells with
their bounds. No claim is judged by eye: every predicate is an estimate with an interval held against a bound.

    supported     the whole interval lies on the claim's side of the bound, everywhere the claim speaks of
    contradicted  somewhere the whole interval lies on the other side
    inconclusive  an interval spans the bound
    not testable  cells or hardware that it needs are missing; the reason names them

A predicate is evaluated in every *context* (model, workload, KV memory, hardware, load; but for the axis that
it runs over) that holds what it needs, and a claim's predicates must all hold. Ratios are paired by seed. The
interval is Student's t from three seeds on, else it comes from the cells' own; a quantity that has neither
(a byte count of a single run) is held against the bound with a margin of 5 %.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvstudy.analysis.claims.judge import Decision, as_json, decide, decide_all
from kvstudy.analysis.claims.schema import Claim, read_claims
from kvstudy.analysis.plan import AnalysisError
from kvstudy.analysis.quality import read_quality
from kvstudy.analysis.table import read_table
from kvstudy.grid.store import write_json

__all__ = ["Claim", "Decision", "as_json", "decide", "decide_all", "main", "read_claims"]


def main(argv: list[str] | None = None) -> int:
    """Command line: cells.parquet + conf/claims -> claims.json."""
    parser = argparse.ArgumentParser(prog="kvstudy claims", description=__doc__.split("\n")[0])
    parser.add_argument("--cells", type=Path, required=True, help="cells.parquet of the study")
    parser.add_argument("--claims", type=Path, required=True, help="folder of claims (conf/claims)")
    parser.add_argument("--quality", type=Path, help="folder of quality.parquet (default: the cells')")
    parser.add_argument("--out", type=Path, required=True, help="claims.json")
    options = parser.parse_args(argv)
    try:
        quality = read_quality(options.quality or options.cells.parent)
        decisions = decide_all(read_claims(options.claims), read_table(options.cells), quality)
    except AnalysisError as error:
        print(f"kvstudy: {error}", file=sys.stderr)
        return 2
    write_json(options.out, as_json(decisions))
    for decision in decisions:
        print(f"{decision.id:22} {decision.status:13} {decision.reason}")
    return 0
