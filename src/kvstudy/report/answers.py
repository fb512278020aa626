"""The study's question answered in a few sentences, which open the report.

What a study varies says what it asks: the axis along which most of its points lie has an answer of its own here, and
quality is spoken of where it was scored. Sentences are sorted out by intervals: what grew, what shrank, and what is
inconclusive because intervals overlap (of two values) or span 1 (of a paired ratio). Where cells are missing there is
no sentence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

from kvstudy.analysis.replicates import CONFIDENCE
from kvstudy.report import style, words
from kvstudy.report.data import StudyData, memory_bytes, told_apart
from kvstudy.report.families import families
from kvstudy.report.findings import HIGHER_IS_BETTER, Finding, admission, cells_of, overlap
from kvstudy.report.tables.measured import in_brief

#: Sentences about the axis, at most; quality may add its own.
MOST = 3
#: How much worse than the whole cache's a perplexity may be to be called near it.
NEAR = 0.1
#: Lengths from which the exponent of growth has an interval.
ENOUGH_LENGTHS = 4

#: How a metric is spoken of.
_NAMES = {"ttft": "time to first token", "e2el": "end-to-end latency"}
_OVERLAP = "the intervals overlap"
_GROWTH = (("grew under", "fell under"), "under", _OVERLAP)


def answers(data: StudyData) -> list[Finding]:
    """The answer, a finding a sentence or two; empty where nothing was measured that would answer."""
    found: list[Finding] = []
    axis, parts = subject(data)
    if axis is not None:
        found += ANSWERS[axis](data, parts)[:MOST]
    return found + _quality(data)


def subject(data: StudyData) -> tuple[str | None, list[pd.DataFrame]]:
    """The axis along which most points of the study lie, and its points, those with most of them first."""
    frame = data.metric("throughput.output") if not data.points.empty else data.points
    frame = frame[frame["state"] != "missing"] if not frame.empty else frame
    if frame.empty:
        return None, []
    found = [(axis, part) for axis, part in families(frame) if axis is not None and part[axis].nunique() > 1]
    if not found:
        return None, []
    count: Counter[str] = Counter()
    for axis, part in found:
        count[axis] += len(part)
    main = count.most_common(1)[0][0]
    alike = _LENGTHS if main in _LENGTHS else (main,)
    # The frame's own rows: `families` calls Poisson arrivals of burstiness 1, which their load's name does not.
    parts = [frame.loc[part.index].assign(_axis=axis) for axis, part in found if axis in alike]
    # Real weights before random ones, whose speed is as true.
    return main, sorted(parts, key=lambda part: (-len(part), bool((part["weights"] == "random").any())))


# --- sorting out ---------------------------------------------------------------------------------


def sorted_out(told: Iterable[tuple[str, str]], fates: tuple[str, ...], unclear: str, why: str) -> str:
    """`(fate, text)` as one predicate: `grew under A and B; inconclusive under C, as the intervals overlap`."""
    by: dict[str, list[str]] = {}
    for fate, text in told:
        by.setdefault(fate, []).append(text)
    parts = [f"{fate} {words.listed(by[fate])}" for fate in fates if fate in by]
    if "" in by:
        parts.append(f"{'is ' if not parts else ''}inconclusive {unclear} {words.listed(by[''])}, as {why}")
    return "; ".join(parts)


def _moved(before: pd.Series, after: pd.Series) -> str:
    """Whether a value grew or fell by its intervals; empty where these overlap or are unknown."""
    if overlap(before, after):
        return ""
    return "grew under" if after["value"] > before["value"] else "fell under"


def _ratio_of(row: pd.Series, shorter: str = "was shorter under", longer: str = "was longer under") -> str:
    """Whether a paired ratio of times is below or above 1; empty where its interval spans 1 or is unknown."""
    return shorter if row["high"] < 1 else longer if row["low"] > 1 else ""


def _rows(data: StudyData, metric: str) -> pd.DataFrame:
    """The quotable points of a metric, by their ids."""
    frame = data.metric(metric)
    firm = (frame["state"] == "ok") & frame["value"].notna() & ~frame["infinite"] & ~frame["starred"]
    return frame[firm].set_index("point")


def _statistic(data: StudyData, metric: str, at: Iterable[str]) -> str:
    """The median where all of the points have its whole interval, else the mean, which has one sooner."""
    median = _rows(data, f"{metric}.p50").reindex(list(at))
    return "mean" if median[["low", "high"]].isna().any(axis=None) else "p50"


def _span(part: pd.DataFrame, axis: str) -> tuple[float, float, pd.DataFrame, pd.DataFrame]:
    """The ends of an axis and the points there, a line each, of the lines that have both; in a legend's order."""
    ok = part[part["state"] == "ok"]
    several = ok.groupby("series")[axis].transform("nunique") > 1
    ranks = pd.Series([style.rank(str(name)) for name in ok["framework"]], index=ok.index)
    ok = ok.assign(_rank=ranks)[several].sort_values("_rank", kind="stable")
    low, high = (float(end) for end in (ok[axis].min(), ok[axis].max()))
    first, last = (ok[ok[axis] == end].drop_duplicates("series").set_index("series") for end in (low, high))
    both = first.index.intersection(last.index, sort=False)
    return low, high, first.loc[both], last.loc[both]


def _change(data: StudyData, before: pd.Series, after: pd.Series, metrics: tuple[str, str]) -> tuple[str, str] | None:
    """(fate, `vLLM (from a to b s)`) of one line between two points; None where a value is missing."""
    one, other = (_rows(data, metric) for metric in metrics)
    if before["point"] not in one.index or after["point"] not in other.index:
        return None
    ends = one.loc[before["point"]], other.loc[after["point"]]
    shown = data.shown(metrics[0])
    return _moved(*ends), f"{after.name} (from {_value(ends[0], shown, '')} to {_value(ends[1], shown)})"


def _value(row: pd.Series, shown: words.Display, unit: str | None = None) -> str:
    """A value with its interval and, where no other is given, its unit."""
    text = words.bracketed(row["value"], row["low"], row["high"], shown.factor)
    return f"{text} {shown.unit if unit is None else unit}".rstrip()


def _paired(data: StudyData, point: pd.Series, metric: str, parts: tuple[str, ...] = ("policy",)) -> pd.DataFrame:
    """Paired ratios of a metric under the load and workload of a point, with the candidates' lines (`series`)."""
    frame = data.attribution
    if frame.empty:
        return frame.assign(series="")
    same = (frame["metric"] == metric) & frame["part"].isin(parts)
    for key in ("model", "workload_key", "kv_memory_mib", "load", "rate", "burstiness", "concurrency"):
        same &= frame[key].isna() if pd.isna(point[key]) else frame[key] == point[key]
    names = dict(zip(data.cells["deployment"], data.cells["series"], strict=True))
    return frame[same].assign(series=[names.get(one, one) for one in frame.loc[same, "candidate"]])


def _of_policies(data: StudyData, point: pd.Series, metric: str) -> pd.DataFrame:
    """The policies' ratios to the whole cache on the same engine."""
    frame = _paired(data, point, metric)
    return frame[frame["baseline_framework"] == "full"] if not frame.empty else frame


def _ratio(row: pd.Series) -> str:
    return f"× {words.bracketed(row['ratio'], row['low'], row['high'])}"


# --- an answer an axis ---------------------------------------------------------------------------


def _mixes(data: StudyData, parts: list[pd.DataFrame]) -> list[Finding]:
    """Whether short requests are held up behind long ones, and whether policies help them."""
    part = parts[0][parts[0]["long_share"] < 1]
    none, most, first, last = _span(part, "long_share")
    if last.empty or none > 0:
        return []
    points = [*last["point"]]
    of = _statistic(data, "ttft.short", points)
    told = [
        change
        for name in last.index
        if (change := _change(data, first.loc[name], last.loc[name], (f"ttft.{of}", f"ttft.short.{of}")))
    ]
    where = f"At {words.load(last.iloc[0])}"
    how = {"p50": "median", "mean": "mean"}[of]
    text = sorted_out(told, *_GROWTH)
    held = f"{where}, from no long requests to {100 * most:.3g} %, the {how} time to first token of short requests "
    found = [Finding(f"{held}{text}.", cells_of(pd.concat([first, last])))] if told else []
    ratios = _of_policies(data, last.iloc[0], "ttft.short")
    if not ratios.empty:
        told = [(_ratio_of(row), f"{row['series']} ({_ratio(row)})") for _, row in ratios.iterrows()]
        text = sorted_out(told, ("was shorter under", "was longer under"), "under", "the intervals span 1")
        lead = f"With {100 * most:.3g} % long, the same short requests' time to first token, against the whole cache "
        found.append(Finding(f"{lead}on the same engine, {text}.", cells_of(ratios)))
    return found


def _bursts(data: StudyData, parts: list[pd.DataFrame]) -> list[Finding]:
    """Whose latency grows with burstiness, and whether a smaller cache absorbs bursts better."""
    part = parts[0].fillna({"burstiness": 1.0})  # Poisson's
    low, high, first, last = _span(part, "burstiness")
    if last.empty:
        return []
    metric = f"e2el.{_statistic(data, 'e2el', [*first['point'], *last['point']])}"
    told = [c for name in last.index if (c := _change(data, first.loc[name], last.loc[name], (metric, metric)))]
    where = f"At {words.load(first.iloc[0].drop('burstiness'))}, from burstiness {words.plain(low)} to "
    text = sorted_out(told, *_GROWTH)
    name = data.shown(metric).label.replace("E2EL", _NAMES["e2el"])
    cells = cells_of(pd.concat([first, last]))
    found = [Finding(f"{where}{words.plain(high)}, the {name} {text}.", cells)] if told else []
    planned = parts[0].set_index("point")
    ends = [
        _of_policies(data, planned.loc[point["point"].iloc[0]], "ttft").set_index("series") for point in (first, last)
    ]
    told = []
    for name in ends[1].index.intersection(ends[0].index, sort=False):
        before, after = (end.loc[name] for end in ends)
        fate = "" if overlap(before, after) else "better" if after["ratio"] < before["ratio"] else "worse"
        told.append((f"got {fate} under" if fate else "", f"{name} ({_ratio(before)} to {_ratio(after)})"))
    if told:
        text = sorted_out(told, ("got better under", "got worse under"), "under", _OVERLAP)
        lead = "From the one to the other the same requests' time to first token, against the whole cache's, "
        found.append(Finding(f"{lead}{text}.", cells_of(pd.concat(ends))))
    return found


def _prefixes(data: StudyData, parts: list[pd.DataFrame]) -> list[Finding]:
    """What sharing a prefix saves where it is shared, and what the others pay at the most that was shared."""
    everything = data.metric("throughput.output")
    at_hand = everything[everything["state"] == "ok"].sort_values(["turns", "shared_share"], na_position="first")
    at_hand = at_hand[at_hand["kv_memory_mib"] == parts[0]["kv_memory_mib"].iloc[0]].drop_duplicates("workload_key")
    told, rows = [], []
    for _, point in at_hand.iterrows():
        if pd.notna(point["turns"]):
            what = f"in conversations of {words.plain(point['turns'])} turns"
        else:
            what = f"with {words.plain(100 * point['shared_share'])} % shared" if point["shared_share"] else "unshared"
        ratios = _paired(data, point, "ttft")
        for _, row in ratios[ratios["candidate_framework"] == ratios["baseline_framework"]].iterrows():
            unclear = "" if _ratio_of(row) else " (inconclusive)"
            told.append((str(row["series"]), f"{_ratio(row)} {what}{unclear}"))
            rows.append(row)
    found = []
    for series in dict.fromkeys(name for name, _ in told):
        text = words.listed(text for name, text in told if name == series)
        lead = f"With {series} the time to first token of the same requests was, of that without, "
        found.append(Finding(f"{lead}{text}.", cells_of(pd.DataFrame(rows))))
    _, most, _, last = _span(parts[0], "shared_share")
    metric = f"ttft.{_statistic(data, 'ttft', last['point'])}"
    values = _rows(data, metric).reindex(last["point"]).dropna(subset="value").sort_values("value")
    if len(values) > 1:
        best, shown = values.iloc[0], data.shown(metric)
        fates = [("", r) if overlap(best, r) else ("longer with", r) for _, r in values.iloc[1:].iterrows()]
        texts = [
            (
                fate,
                f"{row['series']} ({_value(row, shown)})",
            )
            for fate, row in fates
        ]
        text = sorted_out(texts, ("longer with",), "with", _OVERLAP)
        name = shown.label.replace("TTFT", _NAMES["ttft"])
        lead = f"With {words.plain(100 * most)} % shared the {name} was {_value(best, shown)} with {best['series']}"
        found.append(Finding(f"{lead}; {text}.", cells_of(values)))
    return found


def _memories(data: StudyData, parts: list[pd.DataFrame]) -> list[Finding]:
    """Where each stops admitting, and what is left of throughput in the smallest memory."""
    found = admission(data)
    part = parts[0][parts[0]["state"] == "ok"]
    least = part[part["kv_memory_mib"] == part["kv_memory_mib"].min()].sort_values("value", ascending=False)
    if len(least) > 1:
        texts = [
            f"{row['series']} {words.bracketed(row['value'], row['low'], row['high'])}" for _, row in least.iterrows()
        ]
        behind = [str(row["series"]) for _, row in least.iloc[1:].iterrows() if not overlap(least.iloc[0], row)]
        first = least.iloc[0]
        order = f"intervals put {first['series']} before {words.listed(behind)}" if behind else "no order is clear"
        lead = f"In {words.plain(first['kv_memory_mib'])} MiB ({words.load(first)}) output throughput in tokens/s was "
        found.append(Finding(f"{lead}{', '.join(texts)}: {order}.", cells_of(least)))
    return found


_LENGTHS = ("prompt_tokens", "output_tokens")


def _lengths(data: StudyData, parts: list[pd.DataFrame]) -> list[Finding]:
    """How time and memory grow with input and with output: from end to end, and the exponent where there is one."""
    found = []
    one_each = bool((data.metric("e2el.mean")["n"] <= 1).all())
    for part in parts[: len(_LENGTHS)]:
        axis = str(part["_axis"].iloc[0])
        low, high, _, last = _span(part, axis)
        inputs = axis == "prompt_tokens"
        texts = []
        for metric, name in (("ttft.mean", "time to first token"), ("tpot.mean", "time per output token"))[
            not inputs :
        ]:
            shown, rows = data.shown(metric), _rows(data, metric)
            lines = []
            for series in last.index:
                mine = rows.reindex(part.loc[part["series"] == series, "point"]).dropna(subset="value")
                ends = [mine[mine[axis] == end]["value"] for end in (low, high)]
                if not all(len(end) for end in ends):
                    continue
                a, b = (float(end.iloc[0]) for end in ends)
                fate, exponent = _growth(mine[axis].to_numpy(float), mine["value"].to_numpy(float))
                to = f"× {words.number(b / a)} to {words.number(b * shown.factor)} {shown.unit}"
                lines.append((fate, f"{series} ({to}{exponent})"))
            texts += [f"{name} {sorted_out(lines, *_POWERS)}"] if lines else []
        live = _live(data, part, axis, low, high, list(last.index))
        texts += [f"KV in use on the device went from {words.listed(live)}"] if live else []
        if texts:
            lead = f"From {words.integer(low)} to {words.integer(high)} tokens {'in' if inputs else 'out'}, "
            found.append(Finding(f"{lead}{'; '.join(texts)}.", cells_of(part)))
    if found and one_each:
        found[-1].text += " One request a length: no value has an interval, and small differences mean nothing."
    return found


_POWERS = (("grew under", "fell under", "went, with no interval, under"), "under", "the exponents' intervals span 0")


def _growth(lengths: npt.NDArray[np.float64], values: npt.NDArray[np.float64]) -> tuple[str, str]:
    """(fate, text) of a power law through the lengths; the exponent's interval covers the law's misfit, too."""
    if len(np.unique(lengths)) < ENOUGH_LENGTHS:
        return _POWERS[0][2], ""
    fit = stats.linregress(np.log(lengths), np.log(values))
    half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, len(lengths) - 2)) * float(fit.stderr)
    low, high = fit.slope - half, fit.slope + half
    fate = _POWERS[0][0] if low > 0 else _POWERS[0][1] if high < 0 else ""
    return fate, f", as length^{words.bracketed(fit.slope, low, high)}"


def _live(data: StudyData, part: pd.DataFrame, axis: str, low: float, high: float, lines: list[str]) -> list[str]:
    """Peak KV in use on the device at both ends, a text a line."""
    cells = data.usable()
    cells = cells[(cells["source"] != "simulated") & cells["point"].isin(part["point"])]
    bytes_of = memory_bytes(cells, "kv_live", "device").groupby([cells["series"], cells[axis]]).max()
    return [
        f"{words.mib(bytes_of[series, low])} to {words.mib(bytes_of[series, high])} MiB under {series}"
        for series in lines
        if (series, low) in bytes_of.index and (series, high) in bytes_of.index
    ]


def _loads(data: StudyData, parts: list[pd.DataFrame]) -> list[Finding]:
    """Which line to run at the lowest and at the highest load: by latency of the same requests."""
    found = []
    parts = [part for part in parts if part["workload_key"].iloc[0] == parts[0]["workload_key"].iloc[0]]
    for part in parts[:MOST]:
        axis = str(part["_axis"].iloc[0])
        levels = sorted(part[axis].dropna().unique())
        texts, used = [], []
        for level in dict.fromkeys((levels[0], levels[-1])):
            point = part[part[axis] == level].iloc[0]
            told, ratios = _ranked(data, point, "e2el")
            if not told:
                continue
            used.append(ratios)
            full = dict.fromkeys(part.loc[(part[axis] == level) & part["saturated"], "series"])
            where = f"at {words.load(point)}" + (f" ({words.listed(full)} saturated)" if full else "")
            texts.append(f"{where}, by end-to-end latency of the same requests, {told}")
            if _NO_ORDER in told:  # latencies may say nothing where the queue grows, and work done a second does
                told, ratios = _ranked(data, point, "throughput.output")
                if told and _NO_ORDER not in told:
                    used.append(ratios)
                    texts.append(f"by output throughput there, {told}")
        if texts:
            model = f"{part['model'].iloc[0]}: " if len(parts) > 1 else ""
            said = model + " ".join(f"{text[0].upper()}{text[1:]}." for text in texts)
            found.append(Finding(said, cells_of(pd.concat(used))))
    return found


_NO_ORDER = "the order is inconclusive"


def _ranked(data: StudyData, point: pd.Series, metric: str) -> tuple[str, pd.DataFrame]:
    """Who is first at a load, who cannot be told from it, and who is behind."""
    ratios = _paired(data, point, metric, ("engine", "total"))
    if ratios.empty:  # a study without the released engine
        ratios = _of_policies(data, point, metric)
    if ratios.empty:
        return "", ratios
    baseline = words.framework(str(ratios["baseline_framework"].iloc[0]))
    itself = {"series": baseline, "ratio": 1.0, "low": 1.0, "high": 1.0, "cells": ratios["cells"].iloc[0]}
    ranked = pd.concat([ratios, pd.DataFrame([itself])]).drop_duplicates("series")
    ranked = ranked.sort_values("ratio", ascending=metric not in HIGHER_IS_BETTER)
    best, rest = ranked.iloc[0], ranked.iloc[1:]
    text = "is first" + ("" if best["series"] == baseline else f" ({_ratio(best)} of {baseline}'s)")
    near = [str(row["series"]) for _, row in rest.iterrows() if overlap(best, row)]
    behind = [
        str(row["series"]) + ("" if row["series"] == baseline else f" ({_ratio(row)})")
        for _, row in rest.iterrows()
        if str(row["series"]) not in near
    ]
    text = f"{best['series']} {text}"
    if near and not behind:
        return f"{_NO_ORDER}: {text} in value, but all intervals overlap its own", ranked
    text += f", not to be told from {words.listed(in_brief(data.cells, near))}" if near else ""
    return (f"{text}; behind: {words.listed(behind)}" if behind else text), ranked


# --- quality -------------------------------------------------------------------------------------


def _quality(data: StudyData) -> list[Finding]:
    """Down to which budget perplexity stays near the whole cache's, and what that budget saves."""
    frame = data.quality
    if frame.empty:
        return []
    frame = frame[(frame["verdict"] == "VALID") & frame["weights"].eq("pretrained") & frame["depth"].isna()]
    frame = frame[(frame["measure"] == "perplexity") & frame["diff"].notna() & (frame["budget"] < 1)]
    if frame.empty:
        return []
    context = float(frame["context"].max())
    frame = frame[frame["context"] == context]
    whole = frame["value"] - frame["diff"]
    frame = frame.assign(
        line=told_apart(frame),
        **{
            end: frame[column] / whole for end, column in (("more", "diff"), ("low", "diff_low"), ("high", "diff_high"))
        },
    )
    told, saved, used = [], [], []
    for line, rows in sorted(frame.groupby("line"), key=lambda item: style.rank(str(item[1]["framework"].iloc[0]))):
        rows = rows.sort_values("budget", ascending=False).drop_duplicates("budget")
        near = rows[(rows["high"] <= NEAR).cummin()]
        row = near.iloc[-1] if len(near) else rows.iloc[0]
        fate = _NEAR[0] if len(near) else _NEAR[1] if row["low"] > NEAR else ""
        change = words.bracketed(row["more"], row["low"], row["high"], 100)
        told.append((fate, f"{line} (b={words.plain(row['budget'])}: {'+' if row['more'] > 0 else ''}{change} %)"))
        used.append(str(row["cell"]))
        saves = _saving(data, row) if fate != _NEAR[1] else {}
        saved += [(f"{line} b={words.plain(row['budget'])}", saves)] if saves else []
    lead = f"Perplexity after {words.integer(context)} tokens, against the whole cache's, "
    found = [Finding(f"{lead}{sorted_out(told, _NEAR, 'under', 'intervals reach further')}.", used)]
    if saved:
        labels = list(dict.fromkeys(label for _, saves in saved for label in saves))
        texts = [f"{name} {', '.join(saves.get(label, '–') for label in labels)}" for name, saves in saved]
        found.append(Finding(f"Against the whole cache ({'; '.join(labels)}): {'; '.join(texts)}.", used))
    return found


_NEAR = (f"stayed within {100 * NEAR:.0f} % down to the budget of", f"left {100 * NEAR:.0f} % at every budget of")


def _saving(data: StudyData, row: pd.Series) -> dict[str, str]:
    """What a deployment holds on the device, its time per token and its recall against the whole cache's, by label."""
    frame = data.quality
    full = frame[(frame["framework"] == "full") & (frame["model"] == row["model"])]
    full = full.loc[full["context"] == row["context"], "kv_device_bytes"]
    texts = {}
    if len(full) and full.iloc[0] > 0:
        held = 100 * float(row["kv_device_bytes"]) / float(full.iloc[0])
        texts["KV held on the device"] = f"{words.number(held)} %"
    timed = data.attribution
    if not timed.empty:
        own = timed[(timed["candidate"] == row["deployment"]) & (timed["metric"] == "tpot")]
        own = own[own["baseline_framework"] == "full"]
        if len(own):
            at = own.assign(_level=own["rate"].fillna(own["concurrency"])).sort_values("_level").iloc[-1]
            texts[f"time per output token at {words.load(at)}"] = _ratio(at)
    told = frame[(frame["cell"] == row["cell"]) & (frame["measure"] == "retention") & frame["depth"].isna()]
    if len(told):
        at = told.sort_values("context").iloc[-1]
        label = f"change in the share of facts recalled after {words.integer(at['context'])} tokens"
        texts[label] = words.bracketed(at["diff"], at["diff_low"], at["diff_high"])
    return texts


Answer = Callable[[StudyData, list[pd.DataFrame]], list[Finding]]
#: What answers along each axis of `families`.
ANSWERS: dict[str, Answer] = {
    "rate": _loads,
    "concurrency": _loads,
    "long_share": _mixes,
    "shared_share": _prefixes,
    "burstiness": _bursts,
    "prompt_tokens": _lengths,
    "output_tokens": _lengths,
    "kv_memory_mib": _memories,
}
