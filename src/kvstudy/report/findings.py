"""The sentences of the report, decided by the data: what was found, what limits it, what failed.

A sentence claims an order only where the intervals do not overlap, never quotes a starred percentile, and
carries the cells that its numbers came from. Nothing here is typed by hand but the grammar.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pandas as pd

from kvstudy.analysis.replicates import OVER_SEEDS
from kvstudy.analysis.table import MISSING, with_offered
from kvstudy.report import style, words
from kvstudy.report.admission import LOAD, course, observed
from kvstudy.report.data import StudyData, memory_bytes

#: Groups (model, workload, pool) that the summary speaks about; the tables hold all.
MOST_GROUPS = 4

#: Lines that a sentence lists; of more, the best of each framework.
MOST_LINES = 5
HIGHER_IS_BETTER = ("throughput.output",)


@dataclass
class Finding:
    """A sentence or two, and the ids of the cells that the numbers came from."""

    text: str
    cells: list[str] = field(default_factory=list)


def cells_of(frame: pd.DataFrame) -> list[str]:
    """Ids of the cells that the rows of a frame came from."""
    found: dict[str, None] = {}
    for text in frame["cells"]:
        found.update(dict.fromkeys(str(text).split()))
    return list(found)


def _value(row: pd.Series, factor: float, digits: int = 3) -> str:
    return words.number(float(row["value"]) * factor, digits)


def overlap(one: pd.Series, other: pd.Series) -> bool:
    """Whether two intervals overlap; where one is unknown, no order is claimed either."""
    ends = [one["low"], one["high"], other["low"], other["high"]]
    if any(pd.isna(end) for end in ends):
        return True
    return bool(one["low"] <= other["high"] and other["low"] <= one["high"])


def headlines(data: StudyData) -> list[Finding]:
    """What the study found, in the order in which a reader asks."""
    found: list[Finding] = []
    frame = data.points
    if frame.empty or not (frame["state"] == "ok").any():
        return [Finding("No valid cell has been measured yet.")]
    ok = frame[(frame["state"] == "ok") & frame["value"].notna() & ~frame["infinite"]]
    groups = sorted(
        ok.groupby(["model", "workload_key", "kv_memory_mib", "hardware"], sort=True),
        key=lambda item: -item[1]["point"].nunique(),
    )
    for _, group in groups[:MOST_GROUPS]:
        prefix = _prefix(group, ok)
        for finding in (_throughput(group, data), _latency(group, data)):
            if finding is not None:
                found.append(Finding(prefix + finding.text, finding.cells))
    found += [finding for finding in (_memory(data),) if finding is not None]
    found += admission(data)
    found += _attribution(data)
    if len(groups) > MOST_GROUPS:
        rest = len(groups) - MOST_GROUPS
        found.append(Finding(f"{words.count(rest, 'further setting')} (model, workload, KV memory) are in the tables."))
    return found


def _prefix(group: pd.DataFrame, everything: pd.DataFrame) -> str:
    first = group.iloc[0]
    parts = [str(first["model"])] if everything["model"].nunique() > 1 else []
    if everything["workload_key"].nunique() > 1:
        parts.append(words.workload(first, everything))
    if everything["kv_memory_mib"].nunique() > 1:
        parts.append(f"{words.plain(first['kv_memory_mib'])} MiB")
    return f"{', '.join(parts)}: " if parts else ""


def _at_load(group: pd.DataFrame, metric: str, highest: bool) -> tuple[str, str, pd.DataFrame] | None:
    """The points of a metric at the highest or lowest load that at least two lines share, and what that load is.

    The load's name; what sets it apart from the others (highest or burstiest, nothing where it is the only one); the
    points. Arrivals of any burstiness are one kind of load.
    """
    part = group[(group["metric"] == metric) & ~group["starred"]]
    kinds = with_offered(part).fillna({"burstiness": 1.0})
    kinds = kinds[kinds["loop"] == kinds["loop"].mode().iloc[0]] if not part.empty else kinds
    levels = []
    for (rate, concurrency, burstiness), at in kinds.groupby(["rate", "concurrency", "burstiness"], dropna=False):
        if at["series"].nunique() >= min(2, kinds["series"].nunique()):
            at = part.loc[at.index]  # whose names say no burstiness of Poisson arrivals
            levels.append(((words.level(rate, concurrency), burstiness), words.load(at.iloc[0]), at))
    if not levels:
        return None
    levels.sort(key=lambda item: item[0])
    _, load, at = levels[-1 if highest else 0]
    at = at.drop_duplicates("series")
    if len(at) > MOST_LINES:
        at = at.sort_values("value", ascending=metric not in HIGHER_IS_BETTER).drop_duplicates("framework")
    rates, bursts = ({key[place] for key, _, _ in levels} for place in (0, 1))
    if len(rates) > 1:
        rank = "highest" if highest else "lowest"
    elif len(bursts) > 1:
        rank = "burstiest" if highest else "least bursty"
    else:
        rank = ""
    return load, rank, at


def _reduced(group: pd.DataFrame, at: pd.DataFrame) -> bool:
    """Whether a sentence speaks of fewer lines than there are."""
    return bool(group["series"].nunique() > max(MOST_LINES, at["series"].nunique()))


def _throughput(group: pd.DataFrame, data: StudyData) -> Finding | None:
    found = _at_load(group, "throughput.output", highest=True)
    if found is None:
        return None
    load, rank, at = found
    at = at.sort_values("value", ascending=False)
    best = at.iloc[0]
    rivals = [str(row["series"]) for _, row in at.iloc[1:].iterrows() if overlap(best, row)]
    values = [f"{row['series']}: {_value(row, 1)}" for _, row in at.iterrows()]
    best_of = ", the best of each framework," if _reduced(group, at) else ""
    text = f"At {load}, {f'the {rank} load compared, ' if rank else ''}output throughput in tokens/s{best_of} was "
    text += f"{'; '.join(values)}."
    interval = words.interval(best["low"], best["high"])
    bracket = f" (95 % interval {interval})" if interval != "–" else ""
    if len(at) > 1 and rivals:
        text += (
            f" {best['series']} is first in value{bracket}, but the intervals of "
            f"{words.listed(rivals)} overlap its own, so no order among them is claimed."
        )
    elif len(at) > 1:
        factor = float(best["value"]) / float(at.iloc[1]["value"]) if at.iloc[1]["value"] > 0 else float("nan")
        text += f" {best['series']} led{bracket}, {words.number(factor)} times the next; intervals are apart."
    saturated = [str(series) for series in at.loc[at["saturated"], "series"]]
    if saturated:
        text += f" Saturated there: {words.listed(saturated)}."
    return Finding(text, cells_of(at))


def _latency(group: pd.DataFrame, data: StudyData) -> Finding | None:
    parts = []
    frames = []
    where = rank = ""
    for metric, name in (("ttft.p50", "time to first token"), ("tpot.p50", "time per output token")):
        found = _at_load(group, metric, highest=False)
        if found is None:
            continue
        load, ranked, at = found
        where, rank = (where, rank) if where else (load, ranked)
        if load != where:
            continue
        at = at.sort_values("value")
        shown = data.shown(metric)
        values = [f"{row['series']}: {_value(row, shown.factor)}" for _, row in at.iterrows()]
        parts.append(f"the median {name} in {shown.unit} was {', '.join(values)}")
        frames.append(at)
    if not parts:
        return None
    text = f"At {where}, " + (f"the {rank} load with enough samples, " if rank else "")
    return Finding(f"{text}{'; '.join(parts)}.", cells_of(pd.concat(frames)))


def _memory(data: StudyData) -> Finding | None:
    cells = data.usable()
    cells = cells[cells["source"] != "simulated"]
    if cells.empty:
        return None
    frame = cells[["cell", "series", "framework", "budget_share", "model", "kv_memory_mib"]].copy()
    frame["live"] = memory_bytes(cells, "kv_live", "device") / words.MIB
    frame["reserved"] = memory_bytes(cells, "kv_reserved", "device") / words.MIB
    frame["host"] = memory_bytes(cells, "kv_live", "host") / words.MIB
    frame = frame[frame["live"].notna()]
    if frame.empty:
        return None
    keys = ["model", "kv_memory_mib"]
    model, pool = max(frame.groupby(keys, sort=True), key=lambda item: len(item[1]))[1].iloc[0][keys]
    frame = frame[(frame["model"] == model) & (frame["kv_memory_mib"] == pool)]
    parts = []
    peaks = frame.groupby("series", sort=False).agg(
        framework=("framework", "first"),
        budget=("budget_share", "first"),
        live=("live", "max"),
        reserved=("reserved", "max"),
        host=("host", "max"),
    )
    peaks["_rank"] = [style.rank(str(name)) for name in peaks["framework"]]
    first = frame.loc[frame.groupby("series", sort=False)["live"].idxmax()].set_index("series")["cell"]
    low, high = peaks["reserved"].min(), peaks["reserved"].max()
    asides = []
    if pd.notna(low):
        reserved = words.number(low) + ("" if words.number(low) == words.number(high) else f" to {words.number(high)}")
        asides.append(f"of {reserved} MiB reserved")
    if len(peaks) > MOST_LINES:
        peaks = peaks.sort_values("budget", kind="stable").drop_duplicates("framework")
        asides += ["at each framework's smallest budget"] if len(peaks) < len(first) else []
    for series, row in peaks.sort_values(["_rank", "budget"], ascending=[True, False]).iterrows():
        text = f"{series}: {words.number(row['live'])}"
        if pd.notna(row["host"]) and row["host"] > 0:
            text += f" (and {words.number(row['host'])} on the host)"
        parts.append(text)
    aside = f", {', '.join(asides)}," if asides else ""
    also = f" for {model}" if data.table["model"].nunique() > 1 else ""
    return Finding(
        f"The most KV in use at once{also} over all loads{aside} was, in MiB, {'; '.join(parts)}.",
        [str(first[series]) for series in peaks.index],
    )


def admission(data: StudyData) -> list[Finding]:
    """At what KV memory each line stops admitting, a sentence a load."""
    frame = observed(data)
    if frame.empty:
        return []
    found = []
    for _, part in frame.groupby(LOAD, sort=True, dropna=False):
        first = part.iloc[0]
        where = f"{words.workload(first, frame)}, {words.load(first)}"
        texts = [f"{series} {course(line)}" for series, line in part.groupby("series", sort=False)]
        found.append(Finding(f"By KV memory in MiB ({where}): {'; '.join(texts)}.", cells_of(part)))
    return found


#: Metrics of a comparison, as a sentence names them. Time to the first token tells a policy that admits more requests,
#: time per output token what it costs each of them: one alone would mislead.
COMPARED = {"e2el": "E2EL", "ttft": "TTFT", "tpot": "TPOT"}


def _attribution(data: StudyData) -> list[Finding]:
    """Paired latencies, engine and policy apart, at the highest load both were compared at."""
    frame = data.attribution
    if frame.empty:
        return []
    names = dict(zip(data.cells["deployment"], data.cells["series"], strict=True))
    frame = frame[frame["metric"].isin(COMPARED)]
    if frame.empty:
        return []
    keys = ["model", "workload_key", "kv_memory_mib"]
    frame = max(frame.groupby(keys, sort=True), key=lambda item: len(item[1]))[1]
    frame = frame.assign(_level=frame["rate"].fillna(frame["concurrency"]))
    found = []
    for part, lead in (("engine", "The engine"), ("policy", "The policy")):
        mine = frame[frame["part"] == part].groupby(["baseline", "candidate"], sort=False)
        chosen = [_one_load(at[at["_level"] == at["_level"].max()]) for _, at in mine]
        if len(chosen) > MOST_LINES:  # the smallest budget of each framework
            chosen.sort(key=lambda at: float(at["budget_share"].iloc[0]))
            chosen = list({str(at["candidate_framework"].iloc[0]): at for at in reversed(chosen)}.values())
        texts = []
        for at in chosen:
            first = at.iloc[0]
            one, other = (names.get(first[side], str(first[side])) for side in ("candidate", "baseline"))
            of = {str(row["metric"]): row for _, row in at.iterrows()}
            ratios = ", ".join(_compared(of[metric]) for metric in COMPARED if metric in of)
            texts.append(f"{one} against {other}, at {words.load(first)}: {ratios}")
        if chosen:
            text = f"{lead}, by paired requests (a ratio below 1 is faster). {'; '.join(texts)}."
            found.append(Finding(text, cells_of(pd.concat(chosen))))
    return found


def _one_load(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of the last load among those of one level, which may differ in how their arrivals come."""
    kinds = list(frame.groupby(["load", "burstiness"], dropna=False))
    return kinds[-1][1] if kinds else frame


def _compared(row: pd.Series) -> str:
    """A metric's ratio with its interval, and whether it is a change at all."""
    low, high = float(row["low"]), float(row["high"])
    unclear = " (no clear change)" if low <= 1 <= high else ""
    return f"{COMPARED[str(row['metric'])]} × {words.bracketed(row['ratio'], low, high)}{unclear}"


def failures(data: StudyData) -> list[Finding]:
    """What did not give a number, by kind."""
    table = data.cells
    measured = table[table["outcome"] != MISSING]
    found = []
    for outcome, part in measured[measured["outcome"] != "ok"].groupby("outcome"):
        kind = words.OUTCOMES.get(str(outcome), str(outcome))
        cause = part["cause"].dropna()
        also = f" The first cause: {cause.iloc[0]}." if len(cause) else ""
        found.append(
            Finding(
                f"{words.count(len(part), 'cell')} ended as “{kind}” "
                f"({words.listed(dict.fromkeys(part['series']))}).{also}",
                [str(cell) for cell in part["cell"]],
            )
        )
    gated = measured[(measured["outcome"] == "ok") & (measured["verdict"] == "INVALID")]
    for reasons, part in gated.groupby("reasons"):
        found.append(
            Finding(
                f"{words.count(len(part), 'cell')} INVALID ({str(reasons).replace(';', ', ')}): measured, "
                "but the numbers appear in no figure, table or average.",
                [str(cell) for cell in part["cell"]],
            )
        )
    absent = table[table["outcome"] == MISSING]
    if len(absent):
        found.append(
            Finding(
                f"{words.count(len(absent), 'planned cell')} not measured yet.",
                [str(c) for c in absent["cell"]],
            )
        )
    return found


def limits(data: StudyData) -> list[str]:
    """What the reader must not conclude, from what the study is."""
    table = data.table[data.table["outcome"] != MISSING]
    out = []
    if "pydoc" in set(table["text"]):
        out.append(
            "Prompts are cut from the Python documentation, which every machine has. It is a stand-in: "
            "lengths and arrivals are drawn as stated, but the text is not what users write."
        )
    seeds = table["seed"].nunique()
    intervals = set(data.points["interval"]) if not data.points.empty else set()
    if OVER_SEEDS not in intervals and seeds:
        out.append(
            f"{words.count(seeds, 'seed')}: intervals are within a run and do not cover the spread between "
            "runs. Orders whose intervals nearly touch may turn on repetition."
        )
    if (table["device"] == "cpu").any():
        out.append(
            "Measured on a CPU. Ratios between policies carry over to a GPU only where the same resource is "
            "the bottleneck; costs of moving KV between host and device are not testable on a machine whose "
            "device is its host, unless a link is emulated."
        )
    if (table["weights"] == "random").any():
        names = words.listed(sorted(set(table.loc[table["weights"] == "random", "model"])))
        out.append(f"{names} has random weights: its speed and memory mean something, its output does not.")
    if not data.points.empty:
        starred = data.points[data.points["starred"] & (data.points["state"] == "ok")]
        if len(starred):
            out.append(
                f"{words.count(len(starred), 'percentile')} of too few samples (n < 10 / (1 − q)): "
                "they have an asterisk in tables, are drawn faint and are quoted nowhere."
            )
    for source, what in (
        ("simulated", "a policy that masks but frees nothing; it is in no memory figure"),
        ("emulated", "moves between tiers are paced to a stated link, not made over one"),
        ("debug", "an author's fork without its GPU, for correctness only; it is in no figure and no claim"),
    ):
        part = table[table["source"] == source]
        if len(part):
            names = words.listed(words.framework(n) for n in sorted(set(part["framework"])))
            out.append(f"{words.count(len(part), 'cell')} of {names} {source}: {what}.")
    saturated = int(table["saturated"].sum())
    if saturated:
        out.append(
            f"{words.count(saturated, 'cell')} saturated: the queue grew throughout, so latencies there "
            "depend on how long the load lasted and say only that the rate is too high."
        )
    return out
