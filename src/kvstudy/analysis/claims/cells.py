"""The cells as predicates see them: contexts in which only framework, budget, seed and one axis differ.

Ratios are paired by seed. The interval is Student's t from three seeds on, else it comes from the cells' own; a
quantity that has neither (a byte count of a single run) is held against the bound with a margin of 5 %.
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from kvstudy.analysis.claims.estimates import NotTestable, Numbers, exact, log_estimate, variance
from kvstudy.analysis.claims.schema import Side
from kvstudy.analysis.replicates import ENOUGH_SEEDS
from kvstudy.analysis.table import AXES, KEYS, RESULTS, with_offered

GIB = 2**30

_CONDITIONS = (
    "model",
    "parameters",
    "workload",
    "prompt_tokens",
    "long_prompt_tokens",
    "long_share",
    "output_tokens",
    "shared_share",
    "load",
    "offered",
    "burstiness",
    "concurrency",
    "kv_memory_mib",
    "hardware",
)
_AXIS_COLUMNS: dict[str, tuple[str, ...]] = {
    "load": ("offered", "concurrency"),
    "parameters": ("model", "parameters"),
    "burstiness": ("load", "burstiness"),
}


#: Metrics that a claim may name beside those derived here; the table has hundreds of columns more.
_METRIC = re.compile(r"^(ttft|tpot|itl|e2el)\.(p50|mean)|^(throughput|goodput|rate|memory)\.")


def with_derived(table: pd.DataFrame) -> pd.DataFrame:
    """What claims speak of: axes, results, metrics, and level of load, bytes on the device, tokens/s a GiB."""
    kept = [c for c in table.columns if c in (*KEYS, *AXES, *RESULTS) or _METRIC.match(str(c))]
    table = with_offered(table[kept])
    table.attrs = {}
    table["level"] = table["rate"].fillna(table["concurrency"])
    empty = pd.Series(np.nan, index=table.index)
    weights = table.get("memory.weights.device", empty)
    for kind, column in (("reserved", "memory.kv_reserved.device"), ("live", "memory.kv_live_peak.device")):
        kv = table.get(column, empty)
        table[f"kv_gib.{kind}"] = kv / GIB
        table[f"device_gib.{kind}"] = (weights + kv) / GIB
        table[f"throughput_per_gib.{kind}"] = table.get("throughput.output", empty) / table[f"device_gib.{kind}"]
        for end in ("low", "high"):
            if f"throughput.output.{end}" in table:
                per = table[f"throughput.output.{end}"] / table[f"device_gib.{kind}"]
                table[f"throughput_per_gib.{kind}.{end}"] = per
    table["host_gib.live"] = table.get("memory.kv_live_peak.host", empty) / GIB
    return table


#: Value, ends of the interval, and id of a cell.
Value = tuple[float, float, float, str]


class Context:
    """Usable cells that differ in framework, budget, seed and the axis only."""

    def __init__(self, name: str, rows: pd.DataFrame, column: str) -> None:
        self.name = name
        self.rows = rows
        self.column = column
        self._of: dict[Side, pd.DataFrame] = {}
        self._series: dict[tuple[Side, str], dict[float, dict[int, Value]]] = {}

    def values(self, *sides: Side) -> list[float]:
        """Values of the axis at which every side has a cell."""
        found: set[float] | None = None
        for side in sides:
            here = {float(v) for v in self.of(side)[self.column].dropna()}
            found = here if found is None else found & here
        return sorted(found or set())

    def of(self, side: Side) -> pd.DataFrame:
        """Rows of a side: of its framework, at the budget nearest to the wanted one."""
        if side not in self._of:
            self._of[side] = self._pick(side)
        return self._of[side]

    def _pick(self, side: Side) -> pd.DataFrame:
        rows = self.rows[self.rows["framework"] == side.framework]
        if side.variant is not None or (rows["variant"] == "").any():
            rows = rows[rows["variant"] == (side.variant or "")]
        variants = rows["variant"] + rows["implementation"] + " " + rows["rule"] + " " + rows["scheduler"]
        if variants.nunique() > 1:
            # One variant speaks for a framework: that with most cells, of equals the first by name.
            rows = rows[variants == variants.value_counts().sort_index().idxmax()]
        if rows.empty or side.budget is None:
            return rows
        shares = np.array(sorted(set(rows["budget_share"])))
        nearest = float(shares[np.abs(np.log(shares / side.budget)).argmin()])
        if not 0.5 <= nearest / side.budget <= 2.0:
            return rows.iloc[:0]
        return rows[rows["budget_share"] == nearest]

    def label(self, side: Side) -> str:
        """A side as a sentence names it, with the budget that was measured."""
        shares = sorted(set(self.of(side)["budget_share"]))
        name = f"{side.framework} with {side.variant}" if side.variant else side.framework
        return name + (f" b={shares[0]:g}" if len(shares) == 1 and shares[0] < 1 else "")

    def series(self, side: Side, metric: str) -> dict[float, dict[int, Value]]:
        """A side's values of a metric by value of the axis and seed; starred percentiles are left out."""
        if metric not in self.rows:
            raise NotTestable(f"no cell has {metric}")
        if (side, metric) not in self._series:
            rows = self.of(side)
            keep = rows[metric].notna() & rows[self.column].notna()
            if f"{metric}.starred" in rows:
                keep &= ~rows[f"{metric}.starred"].astype(bool)
            rows = rows[keep]
            empty = pd.Series(np.nan, index=rows.index)
            columns = [rows[self.column], rows["seed"], rows[metric]]
            columns += [rows.get(f"{metric}.{end}", empty) for end in ("low", "high")]
            found: dict[float, dict[int, Value]] = {}
            for at, seed, value, low, high, cell in zip(*columns, rows["cell"], strict=True):
                one = (float(value), float(low), float(high), str(cell))
                found.setdefault(float(at), {}).setdefault(int(seed), one)
            self._series[side, metric] = found
        return self._series[side, metric]

    def means(self, side: Side, metric: str) -> dict[float, float]:
        """Mean over seeds of a side's metric by value of the axis, in its order."""
        found = self.series(side, metric)
        return {at: float(np.mean([one[0] for one in found[at].values()])) for at in sorted(found)}

    def ratio(self, metric: str, of: Side, at: float, to: Side, other: float) -> Numbers | None:
        """A side's metric at one value of the axis over a side's at another, paired by seed."""
        above, below = self.series(of, metric).get(at, {}), self.series(to, metric).get(other, {})
        logs, variances, cells = [], [], []
        for seed in above.keys() & below.keys():
            one, two = above[seed], below[seed]
            if one[0] > 0 and two[0] > 0:
                logs.append(float(np.log(one[0] / two[0])))
                parts = (variance(one), variance(two))
                variances.append(None if parts[0] is None or parts[1] is None else parts[0] + parts[1])
                cells += [one[3], two[3]]
        if len(logs) < ENOUGH_SEEDS and None in variances and not exact(metric):
            return None  # a timed number without an interval decides nothing
        return (*log_estimate(logs, variances), sorted(set(cells))) if logs else None


class Cells:
    """The cells that a predicate may look at, and the contexts they form, each made once."""

    def __init__(
        self,
        rows: pd.DataFrame,
        everything: pd.DataFrame,
        quality: pd.DataFrame | None = None,
        device: str | None = None,
    ) -> None:
        self.rows = rows
        self.everything = everything
        self.quality = quality
        self.device = device
        self._contexts: dict[str, list[Context]] = {}

    def contexts(self, axis: str) -> list[Context]:
        """Groups in which a predicate over `axis` is evaluated."""
        if axis not in self._contexts:
            self._contexts[axis] = contexts(self.rows, axis)
        return self._contexts[axis]


def contexts(rows: pd.DataFrame, axis: str) -> list[Context]:
    """Groups of rows that differ in framework, budget, seed and the axis only."""
    column = "level" if axis == "load" else axis
    apart = _AXIS_COLUMNS.get(axis, (axis,))
    keys = [key for key in _CONDITIONS if key not in apart]
    found = []
    for _, part in rows.groupby(keys, dropna=False, sort=True):
        first = part.iloc[0]
        names = [str(first[key]) for key in ("model", "workload") if key not in apart]
        if axis != "kv_memory_mib":
            names.append(f"{first['kv_memory_mib']:g} MiB")
        if axis != "load" and pd.notna(first["token_rate"]):
            names.append(f"{first['token_rate']:g} tokens/s")
        elif axis != "load":
            names.append(f"{first['level']:g} {'requests/s' if pd.notna(first['rate']) else 'in flight'}")
        found.append(Context(", ".join(names), part, column))
    return found
