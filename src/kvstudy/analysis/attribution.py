"""What is due to the engine and what to the policy, as paired ratios.

Every framework serves the same drawn workload, so that request i of one cell and request i of another
are the same prompt at the same scheduled time. The ratio of a comparison is the geometric mean of the
per-request ratios; a mean of ratios of unpaired medians would carry the spread of the workload.

    engine  full / vllm      our engine against the released one, the same whole cache
    policy  <policy> / full  the policy against the whole cache, the same engine
    total   <policy> / vllm  what a user sees; engine x policy

Cells are compared at equal model, hardware, KV memory, workload, load and seed only. The interval is
Student's t over seeds from three seeds on; below that over the requests in their order, as many as they are
worth (neighbours share a queue: `kvstudy.statistics`). `p` is the probability of a ratio so far from 1 if it
were 1, from the same interval; `p_holm` is adjusted for all ratios of the metric in the study (Holm).
Requests that failed in either cell are left out and counted (`lost`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

from kvstudy import statistics
from kvstudy.analysis.plan import AnalysisError
from kvstudy.analysis.replicates import CONFIDENCE, ENOUGH_SEEDS, OVER_SEEDS
from kvstudy.analysis.table import read_columns, read_table, usable
from kvstudy.grid.store import REQUESTS, Layout

BASELINE = "vllm"
CONTROL = "full"
OVER_REQUESTS = "t over effective requests"
WITHIN_CELLS = "within cells"

#: Metrics taken request by request; the last of short requests alone, where a cell has long ones beside them.
PAIRED = ("ttft", "tpot", "e2el", "ttft.short")
THROUGHPUT = "throughput.output"

COLUMNS = (
    "part",
    "baseline",
    "candidate",
    "baseline_framework",
    "candidate_framework",
    "model",
    "weights",
    "workload",
    "workload_key",
    "load",
    "rate",
    "token_rate",
    "burstiness",
    "concurrency",
    "budget_share",
    "kv_memory_mib",
    "metric",
    "ratio",
    "low",
    "high",
    "interval",
    "p",
    "p_holm",
    "seeds",
    "n",
    "lost",
    "saturated",
    "cells",
)

#: What a comparison's two sides share, and the candidate's budget.
SHARED = COLUMNS[COLUMNS.index("model") : COLUMNS.index("metric")]

Floats = npt.NDArray[np.float64]
#: The columns of a cell that comparisons use.
Row = dict[str, Any]


@dataclass(frozen=True)
class Pair:
    """Two cells that were offered the same requests; the candidate is divided by the baseline."""

    part: str
    baseline: Row
    candidate: Row


def pairs(table: pd.DataFrame) -> Iterator[Pair]:
    """Every comparison that the table allows, in the table's order."""
    wanted = ["setting", "cell", "point", "deployment", "framework", "scheduler", "saturated", *SHARED]
    wanted += ["variant", THROUGHPUT, f"{THROUGHPUT}.low", f"{THROUGHPUT}.high"]
    # Plain rows of few columns: a table has hundreds, and a Series of them for each of many thousand cells takes long.
    good = table.loc[usable(table), [name for name in dict.fromkeys(wanted) if name in table]]
    groups: dict[str, list[Row]] = {}
    for row in good.to_dict("records"):
        groups.setdefault(row["setting"], []).append({str(name): value for name, value in row.items()})
    for rows in groups.values():
        released = [row for row in rows if row["framework"] == BASELINE]
        baselines = [row for row in released if row["variant"] == ""] or released
        controls = [row for row in rows if row["framework"] == CONTROL]
        policies = [row for row in rows if row["framework"] not in (BASELINE, CONTROL)]
        for baseline in baselines:
            yield from (Pair("engine", baseline, control) for control in controls)
            # The engine's own answers (a smaller cache, offloading) are policies on the same engine.
            yield from (
                Pair("policy", baseline, other) for other in released if other["variant"] != baseline["variant"]
            )
        for policy in policies:
            own = [c for c in controls if c["scheduler"] == policy["scheduler"]] or controls
            yield from (Pair("policy", control, policy) for control in own)
            yield from (Pair("total", baseline, policy) for baseline in baselines)


@dataclass(frozen=True)
class Times:
    """Latencies in seconds of a cell's requests, by metric, in the order of `index`; NaN where one has none.

    Arrays and not a frame: a study compares each of ten thousand cells several times.
    """

    index: npt.NDArray[np.int64]
    ok: npt.NDArray[np.bool_]
    values: dict[str, Floats]


def request_times(cell_dir: Path) -> Times:
    """TTFT, TPOT and E2EL of the requests of a cell that finished inside the steady window; TTFT of short ones apart.

    The definitions are DESIGN's: clocks start at the scheduled arrival; TPOT needs two tokens.
    """
    times = ["scheduled_s", "first_token_s", "last_token_s", "output_tokens"]
    table = read_columns(cell_dir / REQUESTS, ["index", "status", "in_window", "length_class", *times])
    table = table.filter(table["in_window"]).sort_by("index")
    scheduled, first, last, tokens = (
        table[name].cast("float64").to_numpy(zero_copy_only=False).astype(np.float64) for name in times
    )
    ok, short = (
        np.array([value == wanted for value in table[name].to_pylist()], dtype=bool)
        for name, wanted in (("status", "ok"), ("length_class", "short"))
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = (last - first) / (tokens - 1)
    return Times(
        table["index"].to_numpy().astype(np.int64),
        ok,
        {
            "ttft": np.where(ok, first - scheduled, np.nan),
            "tpot": np.where(ok & (tokens >= 2), tpot, np.nan),
            "e2el": np.where(ok, last - scheduled, np.nan),
            "ttft.short": np.where(ok & short & (not short.all()), first - scheduled, np.nan),
        },
    )


def log_ratios(baseline: Times, candidate: Times) -> tuple[dict[str, Floats], int]:
    """Log ratios by metric of the requests that both cells answered, in order, and how many were lost."""
    below: npt.NDArray[np.intp] | slice = slice(None)
    above: npt.NDArray[np.intp] | slice = slice(None)
    if not np.array_equal(baseline.index, candidate.index):
        _, below, above = np.intersect1d(baseline.index, candidate.index, assume_unique=True, return_indices=True)
    answered = baseline.ok[below] & candidate.ok[above]
    found = {}
    for metric in PAIRED:
        one, other = baseline.values[metric][below], candidate.values[metric][above]
        both = answered & (other > 0) & (one > 0)
        found[metric] = np.log(other[both] / one[both])
    return found, int((~answered).sum())


@lru_cache(maxsize=64)
def _t_quantile(freedom: int) -> float:
    return float(stats.t.ppf(0.5 + CONFIDENCE / 2, freedom))


def t_interval(values: Floats) -> tuple[float, float, float]:
    """Student's t interval of a mean, and the p value of a mean of nought."""
    error = float(values.std(ddof=1) / np.sqrt(len(values)))
    mean, half = float(values.mean()), _t_quantile(len(values) - 1) * error
    p = 2.0 * float(stats.t.sf(abs(mean) / error, len(values) - 1)) if error > 0 else float(mean == 0.0)
    return mean - half, mean + half, p


def dependent_interval(series: list[Floats]) -> tuple[float, float, float]:
    """The same of the mean of pooled series, each of which is worth its effective size; NaN where that is too small."""
    pooled = np.concatenate(series)
    size = sum(statistics.effective_size(one) for one in series)
    low, high, p = (float("nan") if value is None else value for value in statistics.mean_test(pooled, size))
    return low, high, p


def attribute(table: pd.DataFrame, results: Path) -> pd.DataFrame:
    """The attribution table of a study: a row a comparison and metric (columns `COLUMNS`)."""
    layout = Layout(results)
    times: dict[str, Times] = {}

    def of(side: Row) -> Times:
        cell = str(side["cell"])
        if cell not in times:
            times[cell] = request_times(layout.cell(cell))
        return times[cell]

    groups: dict[tuple[str, str, str], list[Pair]] = {}
    for pair in pairs(table):
        key = (pair.part, str(pair.baseline["point"]), str(pair.candidate["point"]))
        groups.setdefault(key, []).append(pair)
    rows: list[dict[str, Any]] = []
    for group in groups.values():
        found = [log_ratios(of(pair.baseline), of(pair.candidate)) for pair in group]
        for metric in PAIRED:
            row = _paired_row(group, metric, [ratios[metric] for ratios, _ in found if len(ratios[metric])])
            if row is not None:
                rows.append({**row, "lost": sum(lost for _, lost in found)})
        rows.extend(_throughput_rows(group))
    out = pd.DataFrame(rows, columns=list(COLUMNS))
    for _, family in out.groupby("metric"):
        out.loc[family.index, "p_holm"] = statistics.holm(family["p"].to_numpy(dtype=np.float64))
    return out


def _common(group: list[Pair]) -> dict[str, Any]:
    first = group[0]
    cells = [str(side["cell"]) for pair in group for side in (pair.baseline, pair.candidate)]
    return {
        "part": first.part,
        "baseline": first.baseline["deployment"],
        "candidate": first.candidate["deployment"],
        "baseline_framework": first.baseline["framework"],
        "candidate_framework": first.candidate["framework"],
        **{key: first.candidate[key] for key in SHARED},
        "saturated": any(bool(side["saturated"]) for p in group for side in (p.baseline, p.candidate)),
        "seeds": len(group),
        "cells": " ".join(dict.fromkeys(cells)),
    }


def _paired_row(group: list[Pair], metric: str, series: list[Floats]) -> dict[str, Any] | None:
    if not series:
        return None
    common = _common(group)
    n = sum(len(one) for one in series)
    if len(series) >= ENOUGH_SEEDS:
        means = np.array([one.mean() for one in series])
        centre, (low, high, p), interval = float(means.mean()), t_interval(means), OVER_SEEDS
    else:
        centre = float(sum(one.sum() for one in series) / n)
        low, high, p = dependent_interval(series)
        interval = OVER_REQUESTS
    return {
        **common,
        "metric": metric,
        "ratio": float(np.exp(centre)),
        "low": float(np.exp(low)),
        "high": float(np.exp(high)),
        "interval": interval,
        "p": p,
        "n": n,
    }


def _throughput_rows(group: list[Pair], metric: str = THROUGHPUT) -> list[dict[str, Any]]:
    """Throughput has no request to pair: the ratio of the cells' values, paired by seed."""
    if metric not in group[0].baseline:
        return []
    above = np.array([float(pair.candidate[metric]) for pair in group])
    below = np.array([float(pair.baseline[metric]) for pair in group])
    fine = np.isfinite(above) & np.isfinite(below) & (above > 0) & (below > 0)
    if not fine.any():
        return []
    logs = np.log(above[fine] / below[fine])
    low = high = p = float("nan")
    interval = "none"
    if len(logs) >= ENOUGH_SEEDS:
        (low, high, p), interval = t_interval(logs), OVER_SEEDS
    else:
        spread = _within(group, metric)
        if spread is not None:
            low, high = float(logs.mean() - spread), float(logs.mean() + spread)
            p = 2.0 * float(stats.norm.sf(abs(logs.mean()) / (spread / stats.norm.ppf(0.5 + CONFIDENCE / 2))))
            interval = WITHIN_CELLS
    row = {
        **_common(group),
        "metric": metric,
        "ratio": float(np.exp(logs.mean())),
        "low": float(np.exp(low)),
        "high": float(np.exp(high)),
        "interval": interval,
        "p": p,
        "n": int(fine.sum()),
        "lost": 0,
    }
    return [row]


def _within(group: list[Pair], metric: str) -> float | None:
    """Half width of the mean log ratio from the cells' own intervals, taken as independent."""
    squares = []
    for pair in group:
        for side in (pair.baseline, pair.candidate):
            low, high = float(side[f"{metric}.low"]), float(side[f"{metric}.high"])
            if not (np.isfinite(low) and np.isfinite(high) and low > 0):
                return None
            squares.append((np.log(high / low) / 2) ** 2)
    return float(np.sqrt(sum(squares)) / len(group))


def main(argv: list[str] | None = None) -> int:
    """Command line: cells.parquet + store -> attribution.csv."""
    parser = argparse.ArgumentParser(prog="kvstudy.analysis.attribution", description=__doc__.split("\n")[0])
    parser.add_argument("--cells", type=Path, required=True, help="cells.parquet of the study")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    try:
        table = attribute(read_table(options.cells), options.results)
    except AnalysisError as error:
        print(f"kvstudy: {error}", file=sys.stderr)
        return 2
    options.out.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.out, index=False)
    print(f"{len(table)} paired ratios -> {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
