"""Do `sweep: cell` and `sweep: deployment` measure the same? `python -m benchmarks.sweeps --json`, five minutes.

The same deployments under the same loads, once with a bring-up a load and once with one for all of them. A load that
comes second finds a server that has served, its peaks reset and its caches cleared: if anything of the first stays, it
shows here. A row a metric and cell: the ratio of one bring-up to one each, met when the two intervals overlap.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.common import Row, emit

ROOT = Path(__file__).resolve().parents[1]
METRICS = ("throughput.output", "ttft.p50", "tpot.p50", "e2el.p50")
STUDY = ("study=quick", "framework=full,h2o", "budget.share=1.0,0.5", "load.rate=1.0,2.2")


def measured(results: Path, sweep: str) -> dict[str, dict[str, object]]:
    """Summaries of the study's cells in one mode, by their names without the hash; measures what is missing."""
    study = [*STUDY, f"sweep={sweep}", f"study.name=sweep-{sweep}", "--results", str(results)]
    subprocess.run([sys.executable, "-m", "kvstudy.cli", "measure", *study], cwd=ROOT, check=True)
    plan = json.loads((results / "plan" / f"sweep-{sweep}" / "plan.json").read_text())
    return {
        cell["id"].rpartition("-")[0]: json.loads((results / "store" / cell["id"] / "summary.json").read_text())
        for cell in plan["cells"]
    }


def rows(results: Path) -> list[Row]:
    """Compare the two modes cell by cell."""
    alone, shared = measured(results, "cell"), measured(results, "deployment")
    found = []
    for name in sorted(alone):
        for metric in METRICS:
            one, other = (summaries[name]["metrics"][metric] for summaries in (alone, shared))  # type: ignore[index]
            ratio = other["value"] / one["value"]
            bounds = [one["low"], one["high"], other["low"], other["high"]]
            met = None if None in bounds else other["low"] <= one["high"] and one["low"] <= other["high"]
            found.append(
                Row(f"{name} {metric}", other["value"], one["unit"], ratio=ratio, target=one["value"], met=met)
            )
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=Path("results"), help="default: ./results")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    options = parser.parse_args()
    emit(rows(options.results.resolve()), options.json)


if __name__ == "__main__":
    main()
