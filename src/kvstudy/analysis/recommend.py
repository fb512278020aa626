"""`kvstudy recommend`: which strategy for my model, context, rate and memory, from measured cells only.

A *line* is a framework with its variant and budget on one model, machine and kind of load. Between measured
points of a line a metric is interpolated, linear in the logarithms of context, KV memory and rate; outside
of them nothing is predicted: the answer is a refusal that says what was measured. The interval is conformal:
each measured point that lies between others is predicted without itself, and the errors of those
predictions, over all lines, say how wrong an interpolation is. `leave_one_out` reports how often such
intervals cover what was measured and how many points were refused.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from kvstudy.analysis.kept_quality import Kept, Unmeasured, kept
from kvstudy.analysis.plan import AnalysisError
from kvstudy.analysis.quality import read_quality
from kvstudy.analysis.replicates import points
from kvstudy.analysis.table import check_one_machine, read_table

#: Metrics that are predicted: name and unit. `kv_live` is the peak on the device, `kv_total` with the host's.
METRICS = {
    "ttft.p50": ("median TTFT", "s"),
    "tpot.p50": ("median TPOT", "s"),
    "e2el.p50": ("median E2EL", "s"),
    "throughput.output": ("output throughput", "tokens/s"),
    "kv_live": ("KV on the device, peak", "MiB"),
    "kv_total": ("KV with the host's, peak", "MiB"),
}
TIERS = ("device", "host")

#: Coordinates of a point, in the order in which they are interpolated.
AXES = ("context", "kv_memory_mib", "level")
_NAMES = {"context": "context", "kv_memory_mib": "KV memory", "level": "rate"}
_UNITS = {"context": "tokens", "kv_memory_mib": "MiB", "level": "requests/s"}

#: Coverage that the intervals aim at; the goal is 0.9, and conformal intervals of few points fall short.
LEVEL = 0.95
#: Errors from which a quantile of them means something; with fewer the largest is doubled.
ENOUGH_ERRORS = 19

#: Why a measured value may have no interval.
NO_SPREAD = "the largest value of a run"
TOO_FEW = "too few requests that do not wait in one queue"

SAME = ("framework", "implementation", "rule", "variant", "scheduler", "model", "hardware", "load")


class Refused(Exception):
    """No prediction is possible from what was measured; the text says why."""


@dataclass(frozen=True)
class Query:
    """What a user has and wants. Times in seconds, memory in MiB."""

    model: str
    context: float
    rate: float
    kv_memory_mib: float
    slo_ttft: float | None = None
    slo_tpot: float | None = None
    slo_e2el: float | None = None
    min_quality: float | None = None

    def slos(self) -> dict[str, float]:
        """Bounds on medians that were asked for."""
        asked = {"ttft.p50": self.slo_ttft, "tpot.p50": self.slo_tpot, "e2el.p50": self.slo_e2el}
        return {metric: bound for metric, bound in asked.items() if bound is not None}


@dataclass
class Prediction:
    """A metric at the queried point, with the cells that it was interpolated from; `unknown` says why no interval."""

    value: float
    low: float
    high: float
    interpolated: bool
    cells: list[str]
    unknown: str = ""


@dataclass
class Answer:
    """A line's answer: predictions and whether the bounds are met, or why there is none."""

    line: str
    framework: str
    budget_share: float
    predictions: dict[str, Prediction] = field(default_factory=dict)
    slo: str = ""
    quality: Kept | None = None
    distance: float = 0.0
    refused: str = ""
    notes: list[str] = field(default_factory=list)


# --- the measured points -------------------------------------------------------------------------


def measured(table: pd.DataFrame) -> pd.DataFrame:
    """Points of a table (a row a point and metric) with coordinates and the name of their line."""
    check_one_machine(table)
    wide = table.copy()
    live = {tier: wide.get(f"memory.kv_live_peak.{tier}", pd.Series(np.nan, index=wide.index)) for tier in TIERS}
    wide["kv_live"] = live["device"] / 2**20
    wide["kv_total"] = (live["device"] + live["host"].fillna(0)) / 2**20
    for kind in ("kv_live", "kv_total"):
        for end in ("low", "high"):
            wide[f"{kind}.{end}"] = np.nan
        wide[f"{kind}.n"] = 1.0
        wide[f"{kind}.starred"] = wide[f"{kind}.infinite"] = False
    frame = points(wide, list(METRICS))
    if frame.empty:
        return frame
    long_prompt = frame["long_prompt_tokens"].fillna(frame["prompt_tokens"])
    frame["context"] = (1 - frame["long_share"]) * frame["prompt_tokens"] + frame["long_share"] * long_prompt
    frame["level"] = frame["rate"].fillna(frame["concurrency"])
    labels = []
    budgeted = set(frame.loc[frame["budget_share"] < 1, "framework"])
    for row in frame.to_dict("records"):
        parts = [str(row[key]) for key in ("framework", "variant", "implementation", "rule") if row[key]]
        parts.append(f"b={row['budget_share']:g}" if row["framework"] in budgeted else "")
        labels.append(" ".join(part for part in parts if part))
    frame["label"] = labels
    return frame


def lines(frame: pd.DataFrame) -> list[pd.DataFrame]:
    """The measured points by line."""
    keys = [*SAME, "burstiness", "budget_share", "output_tokens", "long_share", "shared_share", "turns"]
    return [part for _, part in frame.groupby(keys, dropna=False, sort=True)]


@dataclass(frozen=True)
class Point:
    """A measured point of one metric."""

    at: tuple[float, ...]
    value: float
    half: float
    saturated: bool
    cells: tuple[str, ...]


def points_of(line: pd.DataFrame, metric: str) -> tuple[list[Point], list[tuple[float, ...]]]:
    """Usable points of a metric, and the coordinates of those that failed."""
    part = line[line["metric"] == metric]
    good, failed = [], []
    for row in part.to_dict("records"):
        at = tuple(float(row[axis]) for axis in AXES)
        if row["state"] == "failed" or row["infinite"]:
            failed.append(at)
        elif row["state"] == "ok" and not row["starred"] and row["value"] and row["value"] > 0:
            known = row["low"] and row["high"] and row["low"] > 0 and row["high"] > 0
            half = math.log(row["high"] / row["low"]) / 2 if known and not math.isnan(row["low"]) else 0.0
            cells = tuple(str(row["cells"]).split())
            good.append(Point(at, float(row["value"]), half, bool(row["saturated"]), cells))
    return good, failed


# --- interpolation -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A logarithm with the half width that its points' own intervals give, and how it came about."""

    log: float
    half: float
    saturated: bool
    interpolated: bool
    cells: tuple[str, ...]


def interpolate(found: Sequence[Point], at: Sequence[float], axis: int = 0) -> Estimate:
    """The metric at `at`, linear in logarithms between the two measured values around it on each axis.

    Raises
    ------
    Refused
        `at` lies outside of what was measured, or a neighbour is missing.
    """
    if not found:
        raise Refused("no usable point")
    if axis == len(AXES):
        one = found[0]
        return Estimate(math.log(one.value), one.half, one.saturated, False, one.cells)
    values = sorted({point.at[axis] for point in found})
    want = at[axis]
    below = [value for value in values if value <= want * (1 + 1e-9)]
    above = [value for value in values if value >= want * (1 - 1e-9)]
    if not below or not above:
        name, unit = _NAMES[AXES[axis]], _UNITS[AXES[axis]]
        span = f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g} to {values[-1]:g}"
        raise Refused(f"{name} {want:g} {unit} is outside of what was measured ({span} {unit})")
    low, high = below[-1], above[0]
    first = interpolate([point for point in found if point.at[axis] == low], at, axis + 1)
    if low == high:
        return first
    second = interpolate([point for point in found if point.at[axis] == high], at, axis + 1)
    share = math.log(want / low) / math.log(high / low)
    return Estimate(
        (1 - share) * first.log + share * second.log,
        max(first.half, second.half),
        first.saturated or second.saturated,
        True,
        (*first.cells, *second.cells),
    )


def left_out(frame: pd.DataFrame, metric: str) -> tuple[list[tuple[float, float]], int]:
    """Predicting each point without itself: the log error and the half width that the neighbours' own intervals give.

    And how many points could not be predicted.
    """
    found: list[tuple[float, float]] = []
    refused = 0
    for line in lines(frame):
        good, _ = points_of(line, metric)
        for place, point in enumerate(good):
            rest = [other for other in good[:place] + good[place + 1 :] if other.at != point.at]
            try:
                one = interpolate(rest, point.at)
                found.append((one.log - math.log(point.value), one.half))
            except Refused:
                refused += 1
    return found, refused


def half_width(residuals: Sequence[float]) -> float:
    """Half width, in logs, that covers `LEVEL` of interpolations (conformal; infinite without any error)."""
    sizes = np.sort(np.abs(np.asarray(residuals, dtype=float)))
    if len(sizes) == 0:
        return math.inf
    if len(sizes) < ENOUGH_ERRORS:
        return 2.0 * float(sizes[-1])
    return float(sizes[min(len(sizes), math.ceil((len(sizes) + 1) * LEVEL)) - 1])


@dataclass
class Coverage:
    """How good the intervals are on the measured cells themselves."""

    metric: str
    predicted: int
    covered: int
    refused: int

    @property
    def share(self) -> float:
        """Share of predicted points whose interval holds the measured value."""
        return self.covered / self.predicted if self.predicted else float("nan")


def leave_one_out(frame: pd.DataFrame) -> list[Coverage]:
    """Coverage of each metric: every point is predicted without itself, with an interval like an answer's."""
    out = []
    for metric in METRICS:
        predicted, refused = left_out(frame, metric)
        covered = 0
        for place, (error, half) in enumerate(predicted):
            others = [other for other, _ in predicted[:place] + predicted[place + 1 :]]
            covered += abs(error) <= math.hypot(half, half_width(others))
        out.append(Coverage(metric, len(predicted), covered, refused))
    return out


# --- the answer ----------------------------------------------------------------------------------


def recommend(table: pd.DataFrame, query: Query, quality: pd.DataFrame | None = None) -> list[Answer]:
    """Every line's answer to a query, the best first, refusals last. `quality` is the studies' quality.parquet."""
    frame = measured(table)
    frame = frame[frame["load"] == "poisson"] if not frame.empty else frame
    if frame.empty:
        raise AnalysisError("no open-loop cell has been measured")
    if query.model not in set(frame["model"]):
        known = ", ".join(sorted(set(frame["model"])))
        raise AnalysisError(f"no measured cell of model '{query.model}'; there are {known}")
    spread = {metric: half_width([error for error, _ in left_out(frame, metric)[0]]) for metric in METRICS}
    answers = [_answer(line, query, spread, quality) for line in lines(frame[frame["model"] == query.model])]
    order = {"meets": 0, "may meet": 1, "": 1, "misses": 2}
    return sorted(
        answers,
        key=lambda one: (bool(one.refused), order[one.slo], _rank_value(one), one.line),
    )


def _rank_value(answer: Answer) -> float:
    found = answer.predictions.get("e2el.p50")
    return found.value if found is not None else math.inf


def _answer(line: pd.DataFrame, query: Query, spread: dict[str, float], quality: pd.DataFrame | None) -> Answer:
    first = line.iloc[0]
    outputs = f", {first['output_tokens']:g} tokens out" if pd.notna(first["output_tokens"]) else ""
    answer = Answer(f"{first['label']}{outputs}", str(first["framework"]), float(first["budget_share"]))
    try:
        answer.quality = kept(read_quality(Path()) if quality is None else quality, first, query.context)
    except Unmeasured as reason:
        if query.min_quality is not None:
            answer.refused = str(reason)
            return answer
    at = (query.context, query.kv_memory_mib, query.rate)
    saturated = False
    try:
        for metric in METRICS:
            good, failed = points_of(line, metric)
            _refuse_beside_failures(failed, at)
            if metric.startswith("kv_") and not good:
                continue
            one = interpolate(good, at)
            half = math.hypot(one.half, spread[metric] if one.interpolated else 0.0)
            if math.isinf(half):
                raise Refused("no measured point lies between others, so the error of interpolating is unknown")
            value = math.exp(one.log)
            ends = (value * math.exp(-half), value * math.exp(half))
            cells = list(dict.fromkeys(one.cells))
            unknown = "" if half > 0 else NO_SPREAD if metric.startswith("kv_") else TOO_FEW
            answer.predictions[metric] = Prediction(value, *ends, one.interpolated, cells, unknown)
            saturated |= one.saturated
            answer.distance = max(answer.distance, _distance([point.at for point in good], at))
    except Refused as reason:
        answer.refused = str(reason)
        answer.predictions = {}
        return answer
    if saturated:
        answer.notes.append("a neighbouring measured load was saturated: latencies there measure the queue")
    answer.slo = _bounds(answer, query, saturated)
    return answer


def _refuse_beside_failures(failed: Sequence[tuple[float, ...]], at: Sequence[float]) -> None:
    """A failure at no more context and rate, and no less memory, says that this would fail too."""
    for context, memory, level in failed:
        if context <= at[0] and level <= at[2] and memory >= at[1]:
            raise Refused(f"it failed at context {context:g}, {level:g} requests/s and {memory:g} MiB")


def _distance(known: Sequence[tuple[float, ...]], at: Sequence[float]) -> float:
    """How far the nearest measured point lies: 0 at a point, the largest factor of an axis less one."""
    return min(max(max(a, b) / min(a, b) - 1 for a, b in zip(point, at, strict=True)) for point in known)


def _bounds(answer: Answer, query: Query, saturated: bool) -> str:
    """Whether the bounds that were asked for are met: by the whole interval, in part, or not."""
    states = []
    for metric, bound in query.slos().items():
        one = answer.predictions[metric]
        state = "meets" if one.high <= bound else "misses" if one.low > bound else "may meet"
        states.append("may meet" if state == "meets" and saturated else state)
    if query.min_quality is not None and answer.quality is not None:
        low, high, least = answer.quality.low, answer.quality.high, query.min_quality
        states.append("meets" if low >= least else "misses" if high < least else "may meet")
    return max(states, key=("meets", "may meet", "misses").index) if states else ""


# --- command line --------------------------------------------------------------------------------


def _text(answers: Sequence[Answer], query: Query, coverage: Sequence[Coverage]) -> str:
    out = [
        f"{query.model}, context {query.context:g} tokens, {query.rate:g} requests/s, {query.kv_memory_mib:g} MiB of KV"
    ]
    place = 0
    for answer in answers:
        if answer.refused:
            out.append(f"   - {answer.line}: no answer: {answer.refused}")
            continue
        place += 1
        slo = f" [{answer.slo} the bounds]" if answer.slo else ""
        far = f"interpolated, nearest cell off by {100 * answer.distance:.0f} %" if answer.distance else "measured"
        out.append(f"{place:4}. {answer.line}{slo} ({far})")
        for metric, one in answer.predictions.items():
            interval = f"[{one.low:.4g}, {one.high:.4g}]" if not one.unknown else f"[no interval: {one.unknown}]"
            name, unit = METRICS[metric]
            out.append(f"        {name:25} {one.value:9.4g} {unit:9} {interval}")
        if answer.quality is not None and answer.quality.cells:
            one_quality = answer.quality
            interval = f"[{one_quality.low:.3g}, {one_quality.high:.3g}]"
            out.append(
                f"        {'quality kept':25} {one_quality.value:9.3g} {'':9} {interval} ({one_quality.measure})"
            )
        out += [f"        note: {note}" for note in answer.notes]
    known = [one for one in coverage if one.predicted]
    if known:
        total, covered = sum(one.predicted for one in known), sum(one.covered for one in known)
        refused = sum(one.refused for one in known)
        out.append(
            f"leave-one-out over the cells: intervals cover {covered} of {total} predicted values "
            f"({100 * covered / total:.0f} %), {refused} refused"
        )
    else:
        out.append("leave-one-out over the cells: no measured point lies between others")
    return "\n".join(out)


def positive(text: str) -> float:
    """A number above 0, for argparse."""
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return value


def share(text: str) -> float:
    """A number above 0 and at most 1, for argparse."""
    value = positive(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text} is above 1: give a share, 0.9 for nine tenths")
    return value


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code (1: every line refused)."""
    parser = argparse.ArgumentParser(prog="kvstudy recommend", description=__doc__.split("\n")[0])
    parser.add_argument("--cells", type=Path, nargs="+", required=True, help="cells.parquet of one or more studies")
    parser.add_argument("--model", required=True)
    parser.add_argument("--context", type=positive, required=True, metavar="TOKENS", help="prompt tokens")
    parser.add_argument("--rate", type=positive, required=True, metavar="REQ/S", help="requests a second")
    parser.add_argument("--kv-memory", type=positive, required=True, metavar="MIB", help="MiB for KV on the device")
    for metric in ("ttft", "tpot", "e2el"):
        bound = f"bound on the median {metric.upper()}, seconds"
        parser.add_argument(f"--slo-{metric}", type=positive, metavar="S", help=bound)
    parser.add_argument(
        "--min-quality", type=share, metavar="SHARE", help="share of the whole cache's quality, above 0 and at most 1"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    query = Query(
        options.model,
        options.context,
        options.rate,
        options.kv_memory,
        options.slo_ttft,
        options.slo_tpot,
        options.slo_e2el,
        options.min_quality,
    )
    try:
        table = pd.concat([read_table(path) for path in options.cells]).drop_duplicates("cell")
        quality = pd.concat([read_quality(path.parent) for path in options.cells]).drop_duplicates()
        answers = recommend(table, query, quality)
        coverage = leave_one_out(measured(table))
    except AnalysisError as error:
        print(f"kvstudy: {error}", file=sys.stderr)
        return 2
    if options.json:
        answer = {"query": asdict(query), "answers": [asdict(one) for one in answers]}
        print(json.dumps({**answer, "leave_one_out": [asdict(one) for one in coverage]}, indent=1))
    else:
        print(_text(answers, query, coverage))
    return 0 if any(not answer.refused for answer in answers) else 1


if __name__ == "__main__":
    raise SystemExit(main())
