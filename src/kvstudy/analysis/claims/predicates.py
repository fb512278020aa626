"""How each kind of predicate over measured cells is decided: estimates with intervals, held against bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from kvstudy.analysis.claims.cells import Cells, Context, contexts
from kvstudy.analysis.claims.estimates import (
    Estimate,
    NotTestable,
    Numbers,
    all_of,
    any_of,
    bound_text,
    estimate,
    judge,
)
from kvstudy.analysis.claims.quality import quality
from kvstudy.analysis.claims.schema import (
    Axis,
    Crossing,
    Flat,
    Interaction,
    Limit,
    Needs,
    NoWinner,
    Order,
    Quality,
    Ratio,
    Side,
    Status,
    Survives,
    Trend,
    metric_words,
)
from kvstudy.analysis.table import MISSING, usable

Result = tuple[Status, list[Estimate]]


def _at(axis: str, value: float) -> str:
    """A value of an axis as a person reads it."""
    return f"{axis} {value / 1e6:.4g}M" if axis == "parameters" else f"{axis} {value:g}"


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


def _shared(
    cells: Cells, axis: Axis, sides: Sequence[Side], values: int, at_least: float | None = None
) -> list[tuple[Context, list[float]]]:
    """Contexts with enough values of the axis at which every side was measured, and those values."""
    found = []
    for context in cells.contexts(axis):
        here = [value for value in context.values(*sides) if at_least is None or value >= at_least]
        if len(here) >= values:
            found.append((context, here))
    _need(cells.rows, sides, found, axis if at_least is None else f"{axis} from {at_least:g} on", values)
    return found


def _ratio(predicate: Ratio, cells: Cells) -> Result:
    sides = (predicate.of, predicate.to)
    usable_contexts = _shared(cells, predicate.axis, sides, predicate.values, predicate.at_least)
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
            what = f"{metric_words(predicate.metric)}, {names} ({context.name}{where})"
            numbers.append(estimate(what, one, bound_text(predicate.min, predicate.max), status))
        statuses.append(any_of(mine) if predicate.over == "any" else all_of(mine))
    if not statuses:
        raise NotTestable(f"too few samples for {metric_words(predicate.metric)}")
    return all_of(statuses), numbers


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


def _interaction(predicate: Interaction, cells: Cells) -> Result:
    sides = (predicate.of, predicate.to)
    numbers = []
    for context, values in _shared(cells, predicate.axis, sides, predicate.values):
        ends = [context.ratio(predicate.metric, sides[0], at, sides[1], at) for at in (values[-1], values[0])]
        if ends[0] is None or ends[1] is None:
            continue
        high, low = ends[0], ends[1]
        half = float(np.hypot(*(np.log(one[2] / one[1]) / 2 for one in (high, low))))
        value = high[0] / low[0]
        one = (value, value * float(np.exp(-half)), value * float(np.exp(half)), sorted({*high[3], *low[3]}))
        status = judge(one[1], one[2], predicate.min, predicate.max)
        names = " / ".join(context.label(side) for side in sides)
        where = f"{_at(predicate.axis, values[-1])} over that at {values[0]:g}"
        what = f"{metric_words(predicate.metric)}, {names} at {where} ({context.name})"
        numbers.append(estimate(what, one, bound_text(predicate.min, predicate.max), status))
    if not numbers:
        raise NotTestable(f"too few samples for {metric_words(predicate.metric)}")
    return all_of(number.status for number in numbers), numbers


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
    return all_of(status for status, _ in results), [number for _, numbers in results for number in numbers]


def _along(
    predicate: Flat | Trend, cells: Cells, pick: Callable[[dict[float, float]], tuple[float, float]]
) -> Iterator[tuple[str, Numbers]]:
    """Ratio between two values of the axis of one side, in every context; `pick` names the two."""
    found = _shared(cells, predicate.axis, (predicate.of,), predicate.values)
    for context, _ in found:
        means = context.means(predicate.of, predicate.metric)
        if len(means) < predicate.values:
            continue
        top, bottom = pick(means)
        one = context.ratio(predicate.metric, predicate.of, top, predicate.of, bottom)
        if one is not None:
            where = f"{context.label(predicate.of)} at {_at(predicate.axis, top)} / {bottom:g}"
            yield f"{metric_words(predicate.metric)}, {where} ({context.name})", one


def _extremes(means: dict[float, float]) -> tuple[float, float]:
    """Where the largest and the smallest mean are."""
    return max(means, key=lambda at: means[at]), min(means, key=lambda at: means[at])


def _flat(predicate: Flat, cells: Cells) -> Result:
    numbers = []
    for what, one in _along(predicate, cells, _extremes):
        status = judge(one[1], one[2], None, 1 + predicate.spread)
        bound = bound_text(None, 1 + predicate.spread)
        numbers.append(estimate(what, one, bound, status))
    if not numbers:
        raise NotTestable(f"too few samples for {metric_words(predicate.metric)}")
    return all_of(number.status for number in numbers), numbers


def _trend(predicate: Trend, cells: Cells) -> Result:
    numbers = []
    for what, one in _along(predicate, cells, lambda means: (max(means), min(means))):
        status = judge(one[1], one[2], predicate.min, predicate.max)
        bound = bound_text(predicate.min, predicate.max)
        numbers.append(estimate(what, one, bound, status))
    if not numbers:
        raise NotTestable(f"too few samples for {metric_words(predicate.metric)}")
    return all_of(number.status for number in numbers), numbers


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
            what = f"{metric_words(predicate.metric)}, {names} at {_at(predicate.axis, value)} ({context.name})"
            numbers.append(estimate(what, at, "both sides of 1", status))
    if not statuses:
        raise NotTestable(f"too few samples for {metric_words(predicate.metric)}")
    # One pair that changes places is what the claim says; that another does not is no objection.
    status = any_of(statuses)
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
                place = f"{metric_words(metric)} at {value:g} ({context.name})"
                leader = _leader(sides, context, value, metric, better)
                if leader is None:
                    continue
                places.add(place)
                wins.setdefault(leader[0], set()).add(place)
                if len(wins[leader[0]]) == 1:
                    what = f"{place}: best is {leader[0]}"
                    numbers.append(estimate(what, leader[1], "apart from 1", "supported"))
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
    return all_of(statuses), numbers


def _limit(predicate: Limit, cells: Cells) -> Result:
    everything = cells.everything
    if cells.device is not None:
        everything = everything[everything["device"] == cells.device]
    measured = everything[everything["outcome"] != MISSING]
    side = predicate.of
    statuses: list[Status] = []
    numbers: list[Estimate] = []
    for context in contexts(measured, "prompt_tokens"):
        rows = context.of(side)
        if rows.empty:
            continue
        served = {float(tokens) for tokens in rows.loc[rows["outcome"] == "ok", "prompt_tokens"]}
        failing = {float(tokens) for tokens in rows["prompt_tokens"]} - served
        longest = max(served, default=0.0)
        reached = predicate.min is not None and longest >= predicate.min
        if not failing and not reached:
            continue  # it never failed, and was not asked for what the claim speaks of
        at = min(failing) if failing else longest
        if predicate.max is None:
            statuses.append("supported" if reached else "contradicted")
        else:
            # Between the longest prompt that was served and the shortest that failed lies the limit.
            statuses.append(judge(longest, at, predicate.min, predicate.max) if failing else "contradicted")
        what = f"longest prompt served and shortest that fails, {context.label(side)} ({context.name})"
        bound = bound_text(predicate.min, predicate.max)
        numbers.append(Estimate(what, at, longest, at, bound, statuses[-1], [str(cell) for cell in rows["cell"]]))
    if not statuses:
        variant = f" with {side.variant}" if side.variant else ""
        wanted = f" and none of {predicate.min:g} tokens" if predicate.min is not None else ""
        raise NotTestable(f"no prompt at which {side.framework}{variant} fails{wanted}")
    return all_of(statuses), numbers


def evaluate(predicate: Any, cells: Cells) -> Result:
    """Decide a predicate.

    Raises
    ------
    NotTestable
        The cells do not hold what it needs; says what.
    """
    if isinstance(predicate, Needs):
        raise NotTestable(predicate.what)
    if isinstance(predicate, Quality):
        return quality(predicate, cells.quality)
    table: dict[type, Callable[[Any, Cells], Result]] = {
        Ratio: _ratio,
        Interaction: _interaction,
        Order: _order,
        Flat: _flat,
        Trend: _trend,
        Crossing: _crossing,
        NoWinner: _no_winner,
        Survives: _survives,
        Limit: _limit,
    }
    return table[type(predicate)](predicate, cells)
