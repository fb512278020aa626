"""Predicates about quality: measures of `quality.parquet`, each with its interval, held against a bound.

A row of the frame is one measure of one framework at one budget and context: `value`, `low`, `high`, and the paired
difference to the whole cache `diff`, `diff_low`, `diff_high`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

import numpy as np
import pandas as pd

from kvstudy.analysis.claims.estimates import Estimate, NotTestable, all_of, bound_text, judge
from kvstudy.analysis.claims.schema import Quality, Side, Status

#: "Several" of a claim.
SEVERAL = 2


@dataclass(frozen=True)
class _Number:
    """A number of one measure, model and context."""

    key: tuple[str, str, float]
    value: float
    low: float
    high: float
    cells: tuple[str, ...]
    label: str

    def less(self, other: _Number) -> _Number:
        """The difference to another, their errors taken as independent."""
        half = float(np.hypot((self.high - self.low) / 2, (other.high - other.low) / 2))
        value = self.value - other.value
        label = f"{self.label} less {other.label}"
        return _Number(self.key, value, value - half, value + half, (*self.cells, *other.cells), label)


def quality(predicate: Quality, frame: pd.DataFrame | None) -> tuple[Status, list[Estimate]]:
    """Decide a predicate about quality.

    Raises
    ------
    NotTestable
        The study has no such result; says which.
    """
    numbers = _numbers(predicate, predicate.of, frame)
    if predicate.to is not None:
        others = {one.key: one for one in _numbers(predicate, predicate.to, frame)}
        numbers = [one.less(others[one.key]) for one in numbers if one.key in others]
        if not numbers:
            raise NotTestable(f"no measure of both {predicate.of.framework} and {predicate.to.framework}")
    if predicate.change:
        numbers = _changes(numbers)
    if predicate.over == "mean":
        numbers = _means(numbers)
    bound = bound_text(predicate.min, predicate.max)
    found = [
        Estimate(
            f"{_words(predicate)}, {one.label} ({_where(one.key)})",
            one.value,
            one.low,
            one.high,
            bound,
            judge(one.low, one.high, predicate.min, predicate.max),
            list(one.cells),
        )
        for one in numbers
    ]
    return _pooled([one.status for one in found], predicate.over), found


def _words(predicate: Quality) -> str:
    names = {"diff": "difference to the whole cache", "ratio": "share of the whole cache's", "value": "value"}
    return names[predicate.column] + (" from its chance level" if predicate.minus else "")


def _where(key: tuple[str, str, float]) -> str:
    model, measure, context = key
    return f"{measure}, {model}" + (f", context {context:g}" if context == context else "")


def _numbers(predicate: Quality, side: Side, frame: pd.DataFrame | None) -> list[_Number]:
    wanted = ", ".join(predicate.measures)
    if frame is None or frame.empty:
        raise NotTestable(f"no quality result ({wanted})")
    # Means over all depths of a fact; random weights have no quality.
    frame = frame[frame["depth"].isna() & (frame["verdict"] == "VALID") & (frame["weights"] != "random")]
    rows = frame[[any(fnmatch(str(name), pattern) for pattern in predicate.measures) for name in frame["measure"]]]
    if rows.empty:
        tasks = " (quality=paper_tasks; the data sets come from the hub)" if "accuracy:" in wanted else ""
        raise NotTestable(f"quality was measured, but not {wanted}{tasks}")
    if predicate.contexts is not None:
        rows = rows[rows["context"].between(*predicate.contexts)]
        if rows.empty:
            low, high = predicate.contexts
            raise NotTestable(f"{wanted} was not measured at contexts of {low:g} to {high:g} tokens")
    rows = _of(rows, side, wanted)
    columns = {"diff": ("diff", "diff_low", "diff_high")}.get(predicate.column, ("value", "low", "high"))
    found = []
    for row in rows.to_dict("records"):
        value, low, high = (float(row[name]) for name in columns)
        if predicate.column == "ratio":
            whole = value - float(row["diff"])
            value, low, high = (1 + float(row[name]) / whole for name in ("diff", "diff_low", "diff_high"))
        less = predicate.minus.get(str(row["measure"]), 0.0)
        if not np.isfinite([value, low, high]).all():
            continue
        context = float(row["context"]) if pd.notna(row["context"]) else float("nan")
        share = f" b={row['budget']:g}" if row["budget"] < 1 else ""
        found.append(
            _Number(
                (str(row["model"]), str(row["measure"]), context),
                value - less,
                low - less,
                high - less,
                (str(row["cell"]),),
                f"{side.framework}{share}",
            )
        )
    if not found:
        raise NotTestable(f"{wanted} of {side.framework} has no interval")
    return found


def _of(rows: pd.DataFrame, side: Side, wanted: str) -> pd.DataFrame:
    """Rows of a side: its framework and variant, at the budget nearest to the wanted one within a factor of two."""
    rows = rows[rows["framework"] == side.framework]
    rows = rows[rows["variant"] == (side.variant or "")]
    if len(rows) and side.budget is not None:
        shares = np.array(sorted(set(rows["budget"])))
        nearest = float(shares[np.abs(np.log(shares / side.budget)).argmin()])
        rows = rows[rows["budget"] == nearest] if 0.5 <= nearest / side.budget <= 2.0 else rows.iloc[:0]
    if rows.empty:
        variant = f" with {side.variant}" if side.variant else ""
        budget = f" near b={side.budget:g}" if side.budget is not None else ""
        raise NotTestable(f"no {wanted} of {side.framework}{variant}{budget}")
    variants = rows["implementation"].astype(str) + " " + rows["rule"].fillna("").astype(str)
    return rows[variants == variants.value_counts().sort_index().idxmax()]


def _changes(numbers: Sequence[_Number]) -> list[_Number]:
    """Of each model and measure, the number at the longest context less that at the shortest."""
    groups: dict[tuple[str, str], list[_Number]] = {}
    for one in numbers:
        groups.setdefault(one.key[:2], []).append(one)
    found = []
    for of in groups.values():
        of.sort(key=lambda one: one.key[2])
        if of[-1].key[2] > of[0].key[2]:
            found.append(of[-1].less(of[0]))
    if not found:
        raise NotTestable("needs two contexts of one measure")
    return found


def _means(numbers: Sequence[_Number]) -> list[_Number]:
    """The mean over all measures and contexts of each model."""
    groups: dict[str, list[_Number]] = {}
    for one in numbers:
        groups.setdefault(one.key[0], []).append(one)
    found = []
    for model, of in groups.items():
        value = float(np.mean([one.value for one in of]))
        half = float(np.sqrt(sum(((one.high - one.low) / 2) ** 2 for one in of)) / len(of))
        cells = tuple(dict.fromkeys(cell for one in of for cell in one.cells))
        key = (model, f"mean of {len(of)} measures", float("nan"))
        found.append(_Number(key, value, value - half, value + half, cells, of[0].label))
    return found


def _pooled(statuses: Sequence[str], over: str) -> Status:
    needed = {"most": len(statuses) // 2 + 1, "several": SEVERAL}.get(over)
    if needed is None:
        return all_of(statuses)
    within = sum(status == "supported" for status in statuses)
    outside = sum(status == "contradicted" for status in statuses)
    if within >= needed:
        return "supported"
    return "contradicted" if len(statuses) - outside < needed else "inconclusive"
