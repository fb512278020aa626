"""`kvstudy analyse`: plan + store -> cells, quality (parquet and csv), points.csv, attribution.csv, claims.json.

Deterministic: the same plan and store give the same bytes, so a workflow does not redo what follows.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvstudy.analysis.attribution import attribute
from kvstudy.analysis.claims import as_json, decide_all, read_claims
from kvstudy.analysis.plan import AnalysisError, read_plan
from kvstudy.analysis.quality import QUALITY, build_quality
from kvstudy.analysis.replicates import points
from kvstudy.analysis.table import build, missing
from kvstudy.grid.store import write_json

#: Claims of this checkout.
CLAIMS = Path(__file__).resolve().parents[3] / "conf" / "claims"


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="kvstudy analyse", description=__doc__.split("\n")[0])
    parser.add_argument("--plan", type=Path, required=True, help="plan.json of the study")
    parser.add_argument("--results", type=Path, required=True, help="results folder that holds store/")
    parser.add_argument("--out", type=Path, required=True, help="cells.parquet; the rest goes beside it")
    parser.add_argument("--fingerprint", help="only cells of the machine whose fingerprint begins so")
    parser.add_argument("--claims", type=Path, default=CLAIMS, help="folder of claims (default: conf/claims)")
    parser.add_argument(
        "--no-attribution",
        action="store_true",
        help="leave out attribution.csv, which alone reads the requests of every cell",
    )
    options = parser.parse_args(argv)
    try:
        plan = read_plan(options.plan)
        table = build(plan, options.results, options.fingerprint)
        out: Path = options.out
        out.parent.mkdir(parents=True, exist_ok=True)
        table.to_parquet(out, index=False)
        table.to_csv(out.with_name("cells.csv"), index=False)
        quality = build_quality(plan, options.results)
        quality.to_parquet(out.with_name(QUALITY), index=False)
        quality.to_csv(out.with_name(QUALITY).with_suffix(".csv"), index=False)
        points(table).to_csv(out.with_name("points.csv"), index=False)
        if not options.no_attribution:
            attribute(table, options.results).to_csv(out.with_name("attribution.csv"), index=False)
        decisions = decide_all(read_claims(options.claims), table, quality)
        write_json(out.with_name("claims.json"), as_json(decisions))
    except AnalysisError as error:
        print(f"kvstudy: {error}", file=sys.stderr)
        return 2
    absent = missing(table)
    measured = len(table) - len(absent)
    scored = f", {quality['cell'].nunique()} of {len(plan.quality)} scored" if plan.quality else ""
    print(f"{plan.name}: {measured} of {len(table)} cells measured{scored}, {len(plan.left_out)} left out -> {out}")
    for cell in absent[:20]:
        print(f"  not measured: {cell}")
    if len(absent) > 20:
        print(f"  and {len(absent) - 20} more")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
