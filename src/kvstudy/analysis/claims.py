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
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from kvstudy.analysis.attribution import t_interval
from kvstudy.analysis.plan import AnalysisError
from kvstudy.analysis.replicates import ENOUGH_SEEDS
from kvstudy.analysis.table import AXES, KEYS, MISSING, RESULTS, read_table, usable
from kvstudy.grid.store import write_json

Status = Literal["supported", "contradicted", "inconclusive", "not testable"]

#: Relative margin for a quantity that is counted, not timed, and so has no interval: bytes of memory.
MARGIN = 0.05
GIB = 2**30


class Strict(BaseModel):
    """A record that refuses unknown keys: a misspelt bound must not be ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Side(Strict):
    """Whose number: a framework, at the measured budget nearest to `budget`, within a factor of two."""

    framework: str
    budget: float | None = None


class _Bound(Strict):
    min: float | None = None
    max: float | None = None

    @model_validator(mode="after")
    def _bounded(self) -> _Bound:
        if self.min is None and self.max is None:
            raise ValueError("min or max is needed")
        return self


Axis = Literal["load", "parameters", "prompt_tokens", "output_tokens", "long_share", "kv_memory_mib"]


class Ratio(_Bound):
    """`of` / `to`, bounded; `over` all values of the axis, any, the highest, their mean, or the peaks."""

    kind: Literal["ratio"]
    metric: str
    of: Side
    to: Side
    axis: Axis = "load"
    over: Literal["all", "any", "highest", "mean", "peak"] = "all"
    values: int = 1


class Order(Strict):
    """The metric falls (or stays) from each framework to the next, at all values of the axis."""

    kind: Literal["order"]
    metric: str
    frameworks: tuple[Side, ...]
    axis: Axis = "load"
    tolerance: float = 0.0
    values: int = 2


class Flat(Strict):
    """The metric's largest over its smallest value along the axis is at most 1 + `spread`."""

    kind: Literal["flat"]
    metric: str
    of: Side
    axis: Axis = "load"
    spread: float
    values: int = 2


class Trend(_Bound):
    """The metric at the highest over that at the lowest value of the axis, bounded."""

    kind: Literal["trend"]
    metric: str
    of: Side
    axis: Axis = "load"
    values: int = 2


class Crossing(Strict):
    """Two of the frameworks change places along the axis, each time with intervals apart."""

    kind: Literal["crossing"]
    metric: str
    frameworks: tuple[Side, ...]
    axis: Axis = "load"
    values: int = 2


class NoWinner(Strict):
    """No framework has the best value in every context and metric. `metrics` maps to higher or lower."""

    kind: Literal["no_winner"]
    metrics: dict[str, Literal["higher", "lower"]]
    frameworks: tuple[Side, ...]


class Survives(Strict):
    """At the smallest KV memory where another fails, this one still gives a valid result."""

    kind: Literal["survives"]
    of: Side
    others: tuple[Side, ...]


class Needs(Strict):
    """Something this program does not measure yet, or a machine cannot: the claim waits for it."""

    kind: Literal["needs"]
    what: str


Predicate = Annotated[
    Ratio | Order | Flat | Trend | Crossing | NoWinner | Survives | Needs, Field(discriminator="kind")
]


class Claim(Strict):
    """A statement with its source and what decides it.

    `bytes`: memory claims are decided twice, on reserved and on live bytes; `{bytes}` in a metric stands for
    it. `device`: the claim means something on that device only.
    """

    id: str
    statement: str
    source: str
    decide: tuple[Predicate, ...]
    bytes: tuple[Literal["reserved", "live"], ...] = ()
    device: Literal["cuda"] | None = None
    note: str = ""


@dataclass
class Estimate:
    """A number that a decision rests on."""

    what: str
    value: float
    low: float
    high: float
    bound: str
    status: str
    cells: list[str] = field(default_factory=list)


@dataclass
class Decision:
    """What became of a claim."""

    id: str
    statement: str
    source: str
    status: Status
    reason: str
    numbers: list[Estimate] = field(default_factory=list)
    note: str = ""

    @property
    def cells(self) -> list[str]:
        """Ids of the cells that the decision rests on."""
        return list(dict.fromkeys(cell for number in self.numbers for cell in number.cells))


#: A ratio, its interval, and the cells it came from.
Numbers = tuple[float, float, float, list[str]]


def _estimate(what: str, one: Numbers, bound: str, status: str) -> Estimate:
    return Estimate(what, one[0], one[1], one[2], bound, status, one[3])


def _at(axis: str, value: float) -> str:
    """A value of an axis as a person reads it."""
    return f"{axis} {value / 1e6:.4g}M" if axis == "parameters" else f"{axis} {value:g}"


class NotTestable(Exception):
    """A predicate lacks what it needs; the text says what."""


# --- reading -------------------------------------------------------------------------------------


def read_claims(folder: Path) -> list[Claim]:
    """All claims of a folder, in order of file and entry.

    Raises
    ------
    AnalysisError
        A file is not a list of claims, or two have the same id.
    """
    adapter = TypeAdapter(list[Claim])
    claims: list[Claim] = []
    for path in sorted(folder.glob("*.yaml")):
        try:
            claims += adapter.validate_python(yaml.safe_load(path.read_text(encoding="utf-8"))["claims"])
        except (ValidationError, TypeError, KeyError, yaml.YAMLError) as error:
            first = error.errors()[0] if isinstance(error, ValidationError) else None
            where = ".".join(map(str, first["loc"])) + ": " + first["msg"] if first else repr(error)
            raise AnalysisError(f"{path} is not a list of claims: {where}") from None
    ids = [claim.id for claim in claims]
    twice = {name for name in ids if ids.count(name) > 1}
    if twice:
        raise AnalysisError(f"claims with the same id: {', '.join(sorted(twice))}")
    return claims


# --- the data as predicates see it ---------------------------------------------------------------

_CONDITIONS = (
    "model",
    "parameters",
    "workload",
    "prompt_tokens",
    "long_prompt_tokens",
    "long_share",
    "output_tokens",
    "load",
    "rate",
    "concurrency",
    "kv_memory_mib",
    "hardware",
)
_AXIS_COLUMNS: dict[str, tuple[str, ...]] = {
    "load": ("rate", "concurrency"),
    "parameters": ("model", "parameters"),
}


#: Metrics that a claim may name beside those derived here; the table has hundreds of columns more.
_METRIC = re.compile(r"^(ttft|tpot|itl|e2el)\.p50|^(throughput|goodput|rate|memory)\.")


def with_derived(table: pd.DataFrame) -> pd.DataFrame:
    """What claims speak of: axes, results, metrics, and level of load, bytes on the device, tokens/s a GiB."""
    kept = [c for c in table.columns if c in (*KEYS, *AXES, *RESULTS) or _METRIC.match(str(c))]
    table = table[kept].copy()
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
        variants = rows["implementation"] + " " + rows["rule"] + " " + rows["scheduler"]
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
        return side.framework + (f" b={shares[0]:g}" if len(shares) == 1 and shares[0] < 1 else "")

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
                parts = (_variance(one), _variance(two))
                variances.append(None if parts[0] is None or parts[1] is None else parts[0] + parts[1])
                cells += [one[3], two[3]]
        if len(logs) < ENOUGH_SEEDS and None in variances and not _exact(metric):
            return None  # a timed number without an interval decides nothing
        return (*_log_estimate(logs, variances), sorted(set(cells))) if logs else None


class Cells:
    """The cells that a predicate may look at, and the contexts they form, each made once."""

    def __init__(self, rows: pd.DataFrame, everything: pd.DataFrame) -> None:
        self.rows = rows
        self.everything = everything
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
        if axis != "load":
            names.append(f"{first['level']:g} {'requests/s' if pd.notna(first['rate']) else 'in flight'}")
        found.append(Context(", ".join(names), part, column))
    return found


# --- estimates -----------------------------------------------------------------------------------


def _log_estimate(logs: Sequence[float], variances: Sequence[float | None]) -> tuple[float, float, float]:
    """(value, low, high) on the original scale from log values and the variance of each, where known."""
    values = np.asarray(logs, dtype=float)
    mean = float(values.mean())
    if len(values) >= ENOUGH_SEEDS:
        low, high = t_interval(values)
    elif all(v is not None for v in variances):
        half = 1.96 * float(np.sqrt(sum(v for v in variances if v is not None))) / len(values)
        low, high = mean - half, mean + half
    else:
        low, high = mean + np.log1p(-MARGIN), mean + np.log1p(MARGIN)
    return float(np.exp(mean)), float(np.exp(low)), float(np.exp(high))


def _exact(metric: str) -> bool:
    """Whether a metric is bytes that were counted."""
    return metric.startswith(("kv_", "device_", "host_", "process_"))


def _variance(one: Value) -> float | None:
    """Variance of the logarithm of a value from its interval, None where it has none."""
    _, low, high, _ = one
    if not (np.isfinite(low) and np.isfinite(high) and low > 0):
        return None
    return float((np.log(high / low) / (2 * 1.96)) ** 2)


def judge(low: float, high: float, minimum: float | None, maximum: float | None) -> Status:
    """Where an interval lies against bounds."""
    if (minimum is None or low >= minimum) and (maximum is None or high <= maximum):
        return "supported"
    if (minimum is not None and high < minimum) or (maximum is not None and low > maximum):
        return "contradicted"
    return "inconclusive"


def _bound_text(minimum: float | None, maximum: float | None) -> str:
    parts = [f"≥ {minimum:g}"] if minimum is not None else []
    parts += [f"≤ {maximum:g}"] if maximum is not None else []
    return " and ".join(parts)


def _all(statuses: Iterable[str]) -> Status:
    found = list(statuses)
    if "contradicted" in found:
        return "contradicted"
    return "inconclusive" if "inconclusive" in found else "supported"


def _any(statuses: Iterable[str]) -> Status:
    found = list(statuses)
    if "supported" in found:
        return "supported"
    return "inconclusive" if "inconclusive" in found else "contradicted"


# --- predicates ----------------------------------------------------------------------------------

Result = tuple[Status, list[Estimate]]


def _need(rows: pd.DataFrame, sides: Sequence[Side], found: Sequence[Any], axis: str, values: int) -> None:
    """Say what is missing when no context holds what a predicate needs."""
    if found:
        return
    absent = [side.framework for side in sides if not (rows["framework"] == side.framework).any()]
    if absent:
        raise NotTestable(f"no valid cell of {', '.join(dict.fromkeys(absent))}")
    budgets = [f"{s.framework} near b={s.budget:g}" for s in sides if s.budget is not None]
    wanted = f"{values} values of {axis}" if values > 1 else f"a common value of {axis}"
    extra = f" ({', '.join(budgets)})" if budgets else ""
    raise NotTestable(f"no model and workload where all of them were measured at {wanted}{extra}")


def _ratio(predicate: Ratio, cells: Cells) -> Result:
    sides = (predicate.of, predicate.to)
    usable_contexts = [
        (context, values)
        for context in cells.contexts(predicate.axis)
        if len(values := context.values(*sides)) >= predicate.values
    ]
    _need(cells.rows, sides, usable_contexts, predicate.axis, predicate.values)
    statuses: list[str] = []
    numbers: list[Estimate] = []
    for context, values in usable_contexts:
        of, to = sides
        at = {value: context.ratio(predicate.metric, of, value, to, value) for value in values}
        known = {value: one for value, one in at.items() if one is not None}
        if not known:
            continue
        if predicate.over == "highest":
            known = {max(known): known[max(known)]}
        elif predicate.over in ("mean", "peak"):
            known = {float("nan"): _combined(predicate, context, known)}
        mine = []
        for value, one in known.items():
            status = judge(one[1], one[2], predicate.min, predicate.max)
            mine.append(status)
            where = "" if np.isnan(value) else f" at {_at(predicate.axis, value)}"
            names = " / ".join(context.label(side) for side in sides)
            what = f"{predicate.metric}, {names} ({context.name}{where})"
            numbers.append(_estimate(what, one, _bound_text(predicate.min, predicate.max), status))
        statuses.append(_any(mine) if predicate.over == "any" else _all(mine))
    if not statuses:
        raise NotTestable(f"too few samples for {predicate.metric}")
    return _all(statuses), numbers


def _combined(predicate: Ratio, context: Context, known: Mapping[float, Numbers]) -> Numbers:
    """The ratio's geometric mean over the axis, or the ratio of the peaks."""
    if predicate.over == "peak":
        tops = []
        for side in (predicate.of, predicate.to):
            means = context.means(side, predicate.metric)
            tops.append(max(means, key=lambda at: means[at]))
        peak = context.ratio(predicate.metric, predicate.of, tops[0], predicate.to, tops[1])
        if peak is None:
            raise NotTestable(f"the peaks of {predicate.metric} share no seed")
        return peak
    logs = np.log([one[0] for one in known.values()])
    halves = np.array([np.log(one[2] / one[1]) / 2 for one in known.values()])
    half = float(np.sqrt((halves**2).sum()) / len(halves))
    used = [cell for one in known.values() for cell in one[3]]
    mean = float(logs.mean())
    return float(np.exp(mean)), float(np.exp(mean - half)), float(np.exp(mean + half)), used


def _order(predicate: Order, cells: Cells) -> Result:
    results = [
        _ratio(
            Ratio(
                kind="ratio",
                metric=predicate.metric,
                of=one,
                to=other,
                axis=predicate.axis,
                min=1 - predicate.tolerance,
                values=predicate.values,
            ),
            cells,
        )
        for one, other in zip(predicate.frameworks, predicate.frameworks[1:], strict=False)
    ]
    return _all(status for status, _ in results), [number for _, numbers in results for number in numbers]


def _along(
    predicate: Flat | Trend, cells: Cells, pick: Callable[[dict[float, float]], tuple[float, float]]
) -> Iterator[tuple[str, Numbers]]:
    """Ratio between two values of the axis of one side, in every context; `pick` names the two."""
    found = [
        (context, values)
        for context in cells.contexts(predicate.axis)
        if len(values := context.values(predicate.of)) >= predicate.values
    ]
    _need(cells.rows, (predicate.of,), found, predicate.axis, predicate.values)
    for context, _ in found:
        means = context.means(predicate.of, predicate.metric)
        if len(means) < predicate.values:
            continue
        top, bottom = pick(means)
        one = context.ratio(predicate.metric, predicate.of, top, predicate.of, bottom)
        if one is not None:
            where = f"{context.label(predicate.of)} at {_at(predicate.axis, top)} / {bottom:g}"
            yield f"{predicate.metric}, {where} ({context.name})", one


def _extremes(means: dict[float, float]) -> tuple[float, float]:
    """Where the largest and the smallest mean are."""
    return max(means, key=lambda at: means[at]), min(means, key=lambda at: means[at])


def _flat(predicate: Flat, cells: Cells) -> Result:
    numbers = []
    for what, one in _along(predicate, cells, _extremes):
        status = judge(one[1], one[2], None, 1 + predicate.spread)
        bound = _bound_text(None, 1 + predicate.spread)
        numbers.append(_estimate(what, one, bound, status))
    if not numbers:
        raise NotTestable(f"too few samples for {predicate.metric}")
    return _all(number.status for number in numbers), numbers


def _trend(predicate: Trend, cells: Cells) -> Result:
    numbers = []
    for what, one in _along(predicate, cells, lambda means: (max(means), min(means))):
        status = judge(one[1], one[2], predicate.min, predicate.max)
        bound = _bound_text(predicate.min, predicate.max)
        numbers.append(_estimate(what, one, bound, status))
    if not numbers:
        raise NotTestable(f"too few samples for {predicate.metric}")
    return _all(number.status for number in numbers), numbers


def _crossing(predicate: Crossing, cells: Cells) -> Result:
    numbers: list[Estimate] = []
    statuses: list[str] = []
    found = []
    for context in cells.contexts(predicate.axis):
        for place, one in enumerate(predicate.frameworks):
            for other in predicate.frameworks[place + 1 :]:
                values = context.values(one, other)
                if len(values) >= predicate.values:
                    found.append((context, one, other, values))
    _need(cells.rows, predicate.frameworks, found, predicate.axis, predicate.values)
    for context, one, other, values in found:
        ratios = []
        for value in values:
            at = context.ratio(predicate.metric, one, value, other, value)
            if at is not None:
                ratios.append((value, at))
        if len(ratios) < predicate.values:
            continue
        ahead = [value for value, at in ratios if at[1] > 1]
        behind = [value for value, at in ratios if at[2] < 1]
        clear = len(ahead) + len(behind) == len(ratios)
        status: Status = "supported" if ahead and behind else ("contradicted" if clear else "inconclusive")
        statuses.append(status)
        names = f"{context.label(one)} / {context.label(other)}"
        for value, at in (min(ratios, key=lambda r: r[1][0]), max(ratios, key=lambda r: r[1][0])):
            what = f"{predicate.metric}, {names} at {_at(predicate.axis, value)} ({context.name})"
            numbers.append(_estimate(what, at, "both sides of 1", status))
    if not statuses:
        raise NotTestable(f"too few samples for {predicate.metric}")
    # One pair that changes places is what the claim says; that another does not is no objection.
    status = _any(statuses)
    return status, [n for n in numbers if n.status == status][:8]


def _no_winner(predicate: NoWinner, cells: Cells) -> Result:
    wins: dict[str, set[str]] = {}
    places: set[str] = set()
    numbers: list[Estimate] = []
    for metric, better in predicate.metrics.items():
        if metric not in cells.rows:
            continue
        for context in cells.contexts("load"):
            for value in sorted({float(v) for v in context.rows["level"]}):
                sides = [side for side in predicate.frameworks if value in context.values(side)]
                if len(sides) < len(predicate.frameworks):
                    continue
                place = f"{metric} at {value:g} ({context.name})"
                leader = _leader(sides, context, value, metric, better)
                if leader is None:
                    continue
                places.add(place)
                wins.setdefault(leader[0], set()).add(place)
                if len(wins[leader[0]]) == 1:
                    what = f"{place}: best is {leader[0]}"
                    numbers.append(_estimate(what, leader[1], "apart from 1", "supported"))
    if not places:
        raise NotTestable("no setting in which all of them were measured and one is clearly best")
    status: Status = "supported" if len(wins) > 1 else "contradicted" if len(places) > 1 else "inconclusive"
    for number in numbers:
        number.status = status
    return status, numbers


def _leader(
    sides: Sequence[Side], context: Context, value: float, metric: str, better: str
) -> tuple[str, Numbers] | None:
    """The framework that is better than every other with an interval apart from 1, and the closest ratio."""
    for one in sides:
        ratios = []
        for other in sides:
            if other is one:
                continue
            ratios.append(context.ratio(metric, one, value, other, value))
        apart = [at is not None and (at[1] > 1 if better == "higher" else at[2] < 1) for at in ratios]
        if ratios and all(apart):
            known = [at for at in ratios if at is not None]
            return one.framework, min(known, key=lambda at: abs(np.log(at[0])))
    return None


def _survives(predicate: Survives, cells: Cells) -> Result:
    measured = cells.everything[cells.everything["outcome"] != MISSING]
    sides = (predicate.of, *predicate.others)
    absent = [s.framework for s in sides if not (measured["framework"] == s.framework).any()]
    if absent:
        raise NotTestable(f"no cell of {', '.join(absent)}")
    statuses: list[str] = []
    numbers: list[Estimate] = []
    for context in contexts(measured, "kv_memory_mib"):
        # A gated cell served its requests: it did not fail, it only has no number.
        outcomes = context.rows["outcome"]
        for pool in sorted({float(v) for v in context.rows["kv_memory_mib"]}):
            here = context.rows["kv_memory_mib"] == pool
            mine = context.of(predicate.of)
            mine = mine[mine["kv_memory_mib"] == pool]
            failed = [
                side
                for side in predicate.others
                if (here & (context.rows["framework"] == side.framework)).any()
                and (outcomes[here & (context.rows["framework"] == side.framework)] != "ok").all()
            ]
            if mine.empty or not failed:
                continue
            alive = bool(usable(mine).any())
            statuses.append("supported" if alive else "contradicted")
            names = ", ".join(side.framework for side in failed)
            used = [str(cell) for cell in mine["cell"]]
            what = f"valid results at {pool:g} MiB, where {names} fail ({context.name})"
            share = float(usable(mine).mean())
            numbers.append(Estimate(what, share, share, share, "> 0", statuses[-1], used))
    if not statuses:
        raise NotTestable("no KV memory small enough that another framework fails")
    return _all(statuses), numbers


def _evaluate(predicate: Any, cells: Cells) -> Result:
    if isinstance(predicate, Needs):
        raise NotTestable(predicate.what)
    table: dict[type, Callable[[Any, Cells], Result]] = {
        Ratio: _ratio,
        Order: _order,
        Flat: _flat,
        Trend: _trend,
        Crossing: _crossing,
        NoWinner: _no_winner,
        Survives: _survives,
    }
    return table[type(predicate)](predicate, cells)


# --- deciding ------------------------------------------------------------------------------------


class Judge:
    """Decides claims on one table; cells are sorted into contexts once for all claims."""

    def __init__(self, table: pd.DataFrame) -> None:
        self.everything = with_derived(table)
        self.rows = self.everything[usable(self.everything)]
        self._cells: dict[tuple[str | None, bool], Cells] = {}

    def cells(self, device: str | None, memory: bool) -> Cells:
        """Cells for a claim: of its device, and for one about memory without simulated ones."""
        if (device, memory) not in self._cells:
            rows = self.rows
            if device is not None:
                rows = rows[rows["device"] == device]
            if memory:
                rows = rows[rows["source"] != "simulated"]
            self._cells[device, memory] = Cells(rows, self.everything)
        return self._cells[device, memory]

    def decide(self, claim: Claim) -> list[Decision]:
        """Decide a claim; one about memory once on reserved and once on live bytes."""
        return [self._decide(claim, kind) for kind in (claim.bytes or ("",))]

    def _decide(self, claim: Claim, kind: str) -> Decision:
        name = f"{claim.id} ({kind} bytes)" if kind else claim.id
        done = Decision(name, claim.statement, claim.source, "not testable", "", note=claim.note)
        if claim.device is not None and not (self.rows["device"] == claim.device).any():
            done.reason = f"needs a {claim.device.upper()} device; this study has none"
            return done
        cells = self.cells(claim.device, bool(claim.bytes) or _about_memory(claim))
        statuses: list[Status] = []
        lacking: list[str] = []
        for predicate in claim.decide:
            try:
                status, numbers = _evaluate(_with_bytes(predicate, kind), cells)
            except NotTestable as reason:
                lacking.append(str(reason))
                continue
            statuses.append(status)
            done.numbers += numbers
        # What is refuted stays refuted, whatever the rest of the claim would need.
        if lacking and "contradicted" not in statuses:
            done.reason = "; ".join(dict.fromkeys(lacking))
            done.numbers = []
            return done
        done.status = _all(statuses)
        against = sum(number.status == done.status for number in done.numbers)
        if done.status == "supported":
            done.reason = f"all {len(done.numbers)} numbers lie within the bounds"
        else:
            done.reason = f"{against} of {len(done.numbers)} numbers {_REASONS[done.status]}"
        return done


def _about_memory(claim: Claim) -> bool:
    metrics = [str(getattr(predicate, "metric", "")) for predicate in claim.decide]
    metrics += [name for predicate in claim.decide for name in getattr(predicate, "metrics", {})]
    return any("gib" in metric or metric.startswith("memory.") for metric in metrics)


def decide(claim: Claim, table: pd.DataFrame) -> list[Decision]:
    """Decide one claim on a table."""
    return Judge(table).decide(claim)


_REASONS = {
    "contradicted": "lie outside their bound",
    "inconclusive": "have an interval that spans the bound",
}


def _with_bytes(predicate: Any, kind: str) -> Any:
    metric = getattr(predicate, "metric", None)
    if not kind or metric is None:
        return predicate
    return predicate.model_copy(update={"metric": metric.replace("{bytes}", kind)})


def decide_all(claims: Sequence[Claim], table: pd.DataFrame) -> list[Decision]:
    """Decide every claim."""
    court = Judge(table)
    return [decision for claim in claims for decision in court.decide(claim)]


def as_json(decisions: Sequence[Decision]) -> list[dict[str, Any]]:
    """Decisions as they are stored in claims.json."""
    return [{**asdict(decision), "cells": decision.cells} for decision in decisions]


def main(argv: list[str] | None = None) -> int:
    """Command line: cells.parquet + conf/claims -> claims.json."""
    parser = argparse.ArgumentParser(prog="kvstudy.analysis.claims", description=__doc__.split("\n")[0])
    parser.add_argument("--cells", type=Path, required=True, help="cells.parquet of the study")
    parser.add_argument("--claims", type=Path, required=True, help="folder of claims (conf/claims)")
    parser.add_argument("--out", type=Path, required=True, help="claims.json")
    options = parser.parse_args(argv)
    try:
        decisions = decide_all(read_claims(options.claims), read_table(options.cells))
    except AnalysisError as error:
        print(f"kvstudy: {error}", file=sys.stderr)
        return 2
    write_json(options.out, as_json(decisions))
    for decision in decisions:
        print(f"{decision.id:22} {decision.status:13} {decision.reason}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
