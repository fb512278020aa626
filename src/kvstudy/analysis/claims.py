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
from kvstudy.analysis.table import MISSING, read_table, usable
from kvstudy.grid.store import write_json

Status = Literal["supported", "contradicted", "inconclusive", "not testable"]

#: Relative margin for a quantity that has no interval.
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


def with_derived(table: pd.DataFrame) -> pd.DataFrame:
    """The table with columns that claims speak of: level of load, bytes on the device, tokens/s a GiB."""
    table = table.copy()
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


@dataclass
class Context:
    """Usable cells that differ in framework, budget, seed and the axis only."""

    name: str
    rows: pd.DataFrame
    column: str

    def values(self, *sides: Side) -> list[float]:
        """Values of the axis at which every side has a cell."""
        found: set[float] | None = None
        for side in sides:
            here = {float(v) for v in self.of(side)[self.column].dropna()}
            found = here if found is None else found & here
        return sorted(found or set())

    def of(self, side: Side) -> pd.DataFrame:
        """Rows of a side: of its framework, at the budget nearest to the wanted one."""
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


def contexts(rows: pd.DataFrame, axis: str) -> list[Context]:
    """Groups of cells in which a predicate over `axis` is evaluated."""
    column = "level" if axis == "load" else axis
    apart = _AXIS_COLUMNS.get(axis, (axis,))
    keys = [key for key in _CONDITIONS if key not in apart]
    found = []
    for _, part in rows.groupby(keys, dropna=False, sort=True):
        first = part.iloc[0]
        names = [str(first[key]) for key in ("model", "workload") if key not in apart]
        names.append(f"{first['kv_memory_mib']:g} MiB") if axis != "kv_memory_mib" else None
        if axis != "load":
            names.append(f"{first['level']:g} {'requests/s' if pd.notna(first['rate']) else 'in flight'}")
        found.append(Context(", ".join(names), part, column))
    return found


# --- estimates -----------------------------------------------------------------------------------


def _by_seed(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Value, interval and cell of each seed; starred percentiles and NA are left out."""
    if metric not in rows:
        raise NotTestable(f"no cell has {metric}")
    part = rows[rows[metric].notna()]
    if f"{metric}.starred" in part:
        part = part[~part[f"{metric}.starred"]]
    frame = pd.DataFrame({"seed": part["seed"], "value": part[metric].astype(float), "cell": part["cell"]})
    for end in ("low", "high"):
        name = f"{metric}.{end}"
        frame[end] = part[name].astype(float) if name in part else np.nan
    return frame.drop_duplicates("seed").set_index("seed")


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


def _variance(row: pd.Series) -> float | None:
    low, high = float(row["low"]), float(row["high"])
    if not (np.isfinite(low) and np.isfinite(high) and low > 0):
        return None
    return float((np.log(high / low) / (2 * 1.96)) ** 2)


def ratio(of: pd.DataFrame, to: pd.DataFrame, metric: str) -> Numbers | None:
    """Ratio of two sets of cells, paired by seed, with its interval and the cells it came from."""
    above, below = _by_seed(of, metric), _by_seed(to, metric)
    above, below = above[above["value"] > 0], below[below["value"] > 0]
    seeds = [seed for seed in above.index if seed in below.index]
    if not seeds:
        return None
    logs, variances, cells = [], [], []
    for seed in seeds:
        one, other = above.loc[seed], below.loc[seed]
        logs.append(float(np.log(one["value"] / other["value"])))
        parts = (_variance(one), _variance(other))
        variances.append(None if parts[0] is None or parts[1] is None else parts[0] + parts[1])
        cells += [str(one["cell"]), str(other["cell"])]
    return (*_log_estimate(logs, variances), list(dict.fromkeys(cells)))


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


def _label(side: Side, rows: pd.DataFrame) -> str:
    shares = sorted(set(rows["budget_share"]))
    return side.framework + (f" b={shares[0]:g}" if len(shares) == 1 and shares[0] < 1 else "")


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


def _ratio(predicate: Ratio, rows: pd.DataFrame) -> Result:
    sides = (predicate.of, predicate.to)
    usable_contexts = [
        (context, values)
        for context in contexts(rows, predicate.axis)
        if len(values := context.values(*sides)) >= predicate.values
    ]
    _need(rows, sides, usable_contexts, predicate.axis, predicate.values)
    statuses: list[str] = []
    numbers: list[Estimate] = []
    for context, values in usable_contexts:
        at = {value: _ratio_at(predicate, context, value) for value in values}
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
            names = " / ".join(_label(side, context.of(side)) for side in sides)
            what = f"{predicate.metric}, {names} ({context.name}{where})"
            numbers.append(_estimate(what, one, _bound_text(predicate.min, predicate.max), status))
        statuses.append(_any(mine) if predicate.over == "any" else _all(mine))
    if not statuses:
        raise NotTestable(f"too few samples for {predicate.metric}")
    return _all(statuses), numbers


def _ratio_at(predicate: Ratio, context: Context, value: float) -> Numbers | None:
    of, to = (context.of(side) for side in (predicate.of, predicate.to))
    return ratio(of[of[context.column] == value], to[to[context.column] == value], predicate.metric)


def _combined(predicate: Ratio, context: Context, known: Mapping[float, Numbers]) -> Numbers:
    """The ratio's geometric mean over the axis, or the ratio of the peaks."""
    if predicate.over == "peak":
        best = []
        for side in (predicate.of, predicate.to):
            part = context.of(side)
            means = part.groupby(context.column)[predicate.metric].mean()
            best.append(part[part[context.column] == means.idxmax()])
        peak = ratio(best[0], best[1], predicate.metric)
        if peak is None:
            raise NotTestable(f"the peaks of {predicate.metric} share no seed")
        return peak
    logs = np.log([one[0] for one in known.values()])
    halves = np.array([np.log(one[2] / one[1]) / 2 for one in known.values()])
    half = float(np.sqrt((halves**2).sum()) / len(halves))
    cells = [cell for one in known.values() for cell in one[3]]
    mean = float(logs.mean())
    return float(np.exp(mean)), float(np.exp(mean - half)), float(np.exp(mean + half)), cells


def _order(predicate: Order, rows: pd.DataFrame) -> Result:
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
            rows,
        )
        for one, other in zip(predicate.frameworks, predicate.frameworks[1:], strict=False)
    ]
    return _all(status for status, _ in results), [number for _, numbers in results for number in numbers]


def _along(
    predicate: Flat | Trend, rows: pd.DataFrame, pick: Callable[[pd.Series], tuple[Any, Any]]
) -> Iterator[tuple[str, Numbers]]:
    """Ratio between two values of the axis of one side, in every context; `pick` names the two."""
    found = [
        (context, values)
        for context in contexts(rows, predicate.axis)
        if len(values := context.values(predicate.of)) >= predicate.values
    ]
    _need(rows, (predicate.of,), found, predicate.axis, predicate.values)
    for context, _ in found:
        part = context.of(predicate.of)
        if predicate.metric not in part:
            raise NotTestable(f"no cell has {predicate.metric}")
        means = part.groupby(context.column)[predicate.metric].mean().dropna()
        if len(means) < predicate.values:
            continue
        top, bottom = pick(means)
        one = ratio(part[part[context.column] == top], part[part[context.column] == bottom], predicate.metric)
        if one is not None:
            where = f"{_label(predicate.of, part)} at {_at(predicate.axis, top)} / {bottom:g}"
            yield f"{predicate.metric}, {where} ({context.name})", one


def _flat(predicate: Flat, rows: pd.DataFrame) -> Result:
    numbers = []
    for what, one in _along(predicate, rows, lambda means: (means.idxmax(), means.idxmin())):
        status = judge(one[1], one[2], None, 1 + predicate.spread)
        bound = _bound_text(None, 1 + predicate.spread)
        numbers.append(_estimate(what, one, bound, status))
    if not numbers:
        raise NotTestable(f"too few samples for {predicate.metric}")
    return _all(number.status for number in numbers), numbers


def _trend(predicate: Trend, rows: pd.DataFrame) -> Result:
    numbers = []
    for what, one in _along(predicate, rows, lambda means: (means.index.max(), means.index.min())):
        status = judge(one[1], one[2], predicate.min, predicate.max)
        bound = _bound_text(predicate.min, predicate.max)
        numbers.append(_estimate(what, one, bound, status))
    if not numbers:
        raise NotTestable(f"too few samples for {predicate.metric}")
    return _all(number.status for number in numbers), numbers


def _crossing(predicate: Crossing, rows: pd.DataFrame) -> Result:
    numbers: list[Estimate] = []
    statuses: list[str] = []
    found = []
    for context in contexts(rows, predicate.axis):
        for place, one in enumerate(predicate.frameworks):
            for other in predicate.frameworks[place + 1 :]:
                values = context.values(one, other)
                if len(values) >= predicate.values:
                    found.append((context, one, other, values))
    _need(rows, predicate.frameworks, found, predicate.axis, predicate.values)
    for context, one, other, values in found:
        ratios = []
        for value in values:
            of, to = context.of(one), context.of(other)
            at = ratio(of[of[context.column] == value], to[to[context.column] == value], predicate.metric)
            if at is not None:
                ratios.append((value, at))
        if len(ratios) < predicate.values:
            continue
        ahead = [value for value, at in ratios if at[1] > 1]
        behind = [value for value, at in ratios if at[2] < 1]
        clear = len(ahead) + len(behind) == len(ratios)
        status: Status = "supported" if ahead and behind else ("contradicted" if clear else "inconclusive")
        statuses.append(status)
        names = f"{_label(one, context.of(one))} / {_label(other, context.of(other))}"
        for value, at in (min(ratios, key=lambda r: r[1][0]), max(ratios, key=lambda r: r[1][0])):
            what = f"{predicate.metric}, {names} at {_at(predicate.axis, value)} ({context.name})"
            numbers.append(_estimate(what, at, "both sides of 1", status))
    if not statuses:
        raise NotTestable(f"too few samples for {predicate.metric}")
    # One pair that changes places is what the claim says; that another does not is no objection.
    status = _any(statuses)
    return status, [n for n in numbers if n.status == status][:8]


def _no_winner(predicate: NoWinner, rows: pd.DataFrame) -> Result:
    wins: dict[str, set[str]] = {}
    places: set[str] = set()
    numbers: list[Estimate] = []
    for metric, better in predicate.metrics.items():
        if metric not in rows:
            continue
        for context in contexts(rows, "load"):
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
            of, to = context.of(one), context.of(other)
            at = ratio(of[of[context.column] == value], to[to[context.column] == value], metric)
            ratios.append(at)
        apart = [at is not None and (at[1] > 1 if better == "higher" else at[2] < 1) for at in ratios]
        if ratios and all(apart):
            known = [at for at in ratios if at is not None]
            return one.framework, min(known, key=lambda at: abs(np.log(at[0])))
    return None


def _survives(predicate: Survives, rows: pd.DataFrame, everything: pd.DataFrame) -> Result:
    measured = everything[everything["outcome"] != MISSING]
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
            cells = [str(cell) for cell in mine["cell"]]
            what = f"valid results at {pool:g} MiB, where {names} fail ({context.name})"
            share = float(usable(mine).mean())
            numbers.append(Estimate(what, share, share, share, "> 0", statuses[-1], cells))
    if not statuses:
        raise NotTestable("no KV memory small enough that another framework fails")
    return _all(statuses), numbers


def _evaluate(predicate: Any, rows: pd.DataFrame, everything: pd.DataFrame) -> Result:
    if isinstance(predicate, Needs):
        raise NotTestable(predicate.what)
    if isinstance(predicate, Survives):
        return _survives(predicate, rows, everything)
    table: dict[type, Callable[[Any, pd.DataFrame], Result]] = {
        Ratio: _ratio,
        Order: _order,
        Flat: _flat,
        Trend: _trend,
        Crossing: _crossing,
        NoWinner: _no_winner,
    }
    return table[type(predicate)](predicate, rows)


# --- deciding ------------------------------------------------------------------------------------


def decide(claim: Claim, table: pd.DataFrame) -> list[Decision]:
    """Decide a claim; one about memory once on reserved and once on live bytes."""
    everything = with_derived(table)
    rows = everything[usable(everything)]
    return [_decide(claim, kind, rows, everything) for kind in (claim.bytes or ("",))]


def _decide(claim: Claim, kind: str, rows: pd.DataFrame, everything: pd.DataFrame) -> Decision:
    name = f"{claim.id} ({kind} bytes)" if kind else claim.id
    done = Decision(name, claim.statement, claim.source, "not testable", "", note=claim.note)
    if claim.device is not None and not (rows["device"] == claim.device).any():
        done.reason = f"needs a {claim.device.upper()} device; this study has none"
        return done
    if claim.device is not None:
        rows = rows[rows["device"] == claim.device]
    if "memory" in claim.statement.lower() or claim.bytes:
        rows = rows[rows["source"] != "simulated"]
    statuses: list[Status] = []
    try:
        for predicate in claim.decide:
            status, numbers = _evaluate(_with_bytes(predicate, kind), rows, everything)
            statuses.append(status)
            done.numbers += numbers
    except NotTestable as lacking:
        # What was refuted stays refuted, whatever the rest of the claim would need.
        if "contradicted" not in statuses:
            done.reason = str(lacking)
            return done
    done.status = _all(statuses)
    against = [n for n in done.numbers if n.status == done.status]
    if done.status != "supported":
        done.reason = f"{len(against)} of {len(done.numbers)} numbers {_REASONS[done.status]}"
    else:
        done.reason = f"all {len(done.numbers)} numbers lie within the bounds"
    return done


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
    return [decision for claim in claims for decision in decide(claim, table)]


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
