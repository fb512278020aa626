"""The figures of a study, each a function from its data to a drawing and a caption made from the data.

`python -m kvstudy.report.figures NAME --study-dir results/<study> --out-dir DIR` writes NAME.pdf,
NAME.png, NAME.caption.txt and NAME.caption.rst. A figure that a study has no data for says so in its
place; it never fails, so that a report is always whole.

Honesty is built in here once: failed and gated points are marked and never joined, saturated points are
open, a starred percentile is drawn faint, simulated results are in no memory figure.
"""

from __future__ import annotations

import argparse
import math
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from matplotlib.transforms import ScaledTranslation

from kvstudy.analysis.plan import AnalysisError
from kvstudy.analysis.replicates import OVER_SEEDS
from kvstudy.grid.store import MEMORY, write_text
from kvstudy.report import FIGURES as CATEGORIES
from kvstudy.report import style, words
from kvstudy.report.data import StudyData

MIB = words.MIB
Floats = npt.NDArray[np.float64]

#: Panels of one figure; more are left to the tables, and the caption says so.
MOST_PANELS = 12


@dataclass
class Drawn:
    """A figure, its caption, and whether it needs the width of the page."""

    figure: Figure
    caption: str
    wide: bool = False


@dataclass(frozen=True)
class Kind:
    """A registered figure: its name, the title and category it has in reports, and how it is drawn."""

    name: str
    title: str
    category: str
    draw: Callable[[StudyData], Drawn]


FIGURES: dict[str, Kind] = {}


def figure(name: str, title: str) -> Callable[[Callable[[StudyData], Drawn]], Any]:
    """Register a figure under a name."""

    def register(draw: Callable[[StudyData], Drawn]) -> Callable[[StudyData], Drawn]:
        FIGURES[name] = Kind(name, title, CATEGORIES[name], draw)
        return draw

    return register


def draw(name: str, data: StudyData) -> Drawn:
    """Draw a registered figure.

    Raises
    ------
    AnalysisError
        There is no figure of that name.
    """
    if name not in FIGURES:
        raise AnalysisError(f"no figure '{name}'; there are {', '.join(FIGURES)}")
    style.use()
    return FIGURES[name].draw(data)


# --- shared pieces -------------------------------------------------------------------------------


def _empty(reason: str) -> Drawn:
    drawing, axes = plt.subplots(figsize=(style.COLUMN, 1.1))
    axes.set_axis_off()
    axes.text(0.5, 0.5, _wrapped(f"No data: {reason}", 56), ha="center", va="center", color=style.GREY)
    return Drawn(drawing, f"No data for this figure: {reason}.")


def _wrapped(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width))


def _grid(n: int, height: float = 1.75) -> tuple[Figure, list[Axes], bool]:
    """Axes for n panels: one column wide for a single panel, else up to three across the page."""
    if n == 1:
        drawing, axes = plt.subplots(figsize=(style.COLUMN, 2.45))
        return drawing, [axes], False
    columns = n if n <= 3 else (2 if n == 4 else 3)
    rows = -(-n // columns)
    drawing, grid = plt.subplots(rows, columns, figsize=(style.PAGE, height * rows + 0.45), squeeze=False)
    flat = list(grid.flat)
    for spare in flat[n:]:
        spare.set_axis_off()
    return drawing, flat[:n], True


def _legend(drawing: Figure, handles: Sequence[Any], wide: bool) -> None:
    """One legend above the panels, where it covers no data; columns are as many as fit the width."""
    if not handles:
        return
    longest = max(len(str(handle.get_label())) for handle in handles)
    room = style.PAGE if wide else style.COLUMN
    columns = max(1, min(len(handles), int(room / (0.31 + 0.05 * longest))))
    rows = -(-len(handles) // columns)
    # The legend takes its height from the panels: give it back.
    width, height = drawing.get_size_inches()
    drawing.set_size_inches(width, height + 0.15 * max(0, rows - 1))
    drawing.legend(handles=_by_column(list(handles), columns), loc="outside upper center", ncols=columns)


def _by_column(handles: list[Any], columns: int) -> list[Any]:
    """Order handles so that matplotlib, which fills legends by column, shows them in reading order."""
    n = len(handles)
    rows = -(-n // columns)
    full = n % columns or columns  # columns that have `rows` entries
    out = []
    for column in range(columns):
        depth = rows if column < full else rows - 1
        out += [handles[column + row * columns] for row in range(depth)]
    return out


def _line_handle(label: str, name: str, variant: int, marker: bool = True) -> Line2D:
    look = style.look(name)
    return Line2D(
        [],
        [],
        color=look.colour,
        marker=look.marker if marker else None,
        linestyle=style.DASHES[variant % len(style.DASHES)],
        label=label,
    )


def _mark_handles(saturated: bool, failed: bool, gated: bool, starred: bool) -> list[Line2D]:
    handles = []
    if saturated:
        handles.append(Line2D([], [], color=style.GREY, marker="o", mfc="white", linestyle="", label="saturated"))
    if failed:
        handles.append(Line2D([], [], color=style.GREY, marker=style.FAILED_MARKER, linestyle="", label="failed"))
    if gated:
        handles.append(Line2D([], [], color=style.GREY, marker=style.GATED_MARKER, ms=6, linestyle="", label="gated"))
    if starred:
        handles.append(Line2D([], [], color=style.GREY, marker="o", alpha=0.35, linestyle="", label="few samples"))
    return handles


def _ticks(axes: Axes, values: Sequence[float]) -> None:
    """Put ticks where the settings are, on a log axis where they span a factor of eight or more."""
    distinct = sorted(set(values))
    low, high = distinct[0], distinct[-1]
    if low > 0 and high / low >= 8:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
        pad = (high / low) ** 0.08
        axes.set_xlim(low / pad, high * pad)
    else:
        pad = 0.09 * (high - low) or 0.5 * high
        axes.set_xlim(low - pad, high + pad)
    if len(distinct) <= 7:
        axes.xaxis.set_major_locator(FixedLocator(distinct))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: words.plain(value)))


#: Height, as a share of the axes, of a row of marks for points that have no value.
_STRIP = 0.075


def _scale_y(axes: Axes, values: Sequence[float], reserved: float = 0.0) -> None:
    """Start at zero, unless the values span so much that only a log axis shows the small ones.

    `reserved` is the share of the height that is kept free at the top for marks.
    """
    positive = [value for value in values if value > 0]
    room = max(0.2, 0.94 - reserved)
    if not positive:
        axes.set_ylim(0, 1)
    elif len(positive) == len(values) and max(positive) / min(positive) > 40:
        low, high = math.log10(min(positive)) - 0.1, math.log10(max(positive))
        axes.set_yscale("log")
        axes.set_ylim(10**low, 10 ** (low + (high - low) / room))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: words.plain(value)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(0, max(positive) / room)


def _errors(part: pd.DataFrame, factor: float) -> Floats:
    value = part["value"].to_numpy(dtype=float)
    low = np.fmax(value - part["low"].to_numpy(dtype=float), 0)
    high = np.fmax(part["high"].to_numpy(dtype=float) - value, 0)
    ends: Floats = np.nan_to_num(np.vstack([low, high])) * factor
    return ends


def _interval_text(frame: pd.DataFrame) -> str:
    kinds = set(frame.loc[frame["state"] == "ok", "interval"]) - {"none"}
    if not kinds:
        return ""
    if kinds == {OVER_SEEDS}:
        return "Bars: 95 % intervals, Student's t over seeds"
    if OVER_SEEDS in kinds:
        return "Bars: 95 % intervals, Student's t over seeds where three or more succeeded, else within the cell"
    return "Bars: 95 % intervals within the cell (one run, so they do not cover the spread between runs)"


def _samples_text(data: StudyData, frame: pd.DataFrame) -> str:
    """Requests behind a point: a latency's own n, or that of the latencies of the same points."""
    requests = frame if set(frame["metric"]) <= {"ttft.p50", "tpot.p50", "e2el.p50"} else data.metric("e2el.p50")
    counts = requests.loc[(requests["state"] == "ok") & requests["point"].isin(set(frame["point"])), "n"]
    counts = counts[counts > 0]
    if counts.empty:
        return ""
    low, high = int(counts.min()), int(counts.max())
    return f"n = {low} requests a point" if low == high else f"n = {low} to {high} requests a point"


def _setting_text(data: StudyData, frame: pd.DataFrame) -> str:
    """Workload, arrivals, seeds and machine: what every caption must state."""
    table = data.table[data.table["point"].isin(set(frame["point"]))] if "point" in frame else data.table
    models = []
    for name, part in table.groupby("model", sort=True):
        first = part.iloc[0]
        marked = ", random weights" if first["weights"] == "random" else ""
        models.append(f"{name} ({first['dtype']}{marked})")
    texts = [words.TEXTS.get(str(text), str(text)) for text in sorted(set(table["text"]))]
    arrivals = [words.ARRIVALS.get(str(kind), str(kind)) for kind in sorted(set(table["load"]))]
    seeds = sorted({int(seed) for seed in table["seed"]})
    seed_text = f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds ({words.span(seeds)})"
    pools = words.span([float(value) for value in table["kv_memory_mib"].unique()])
    noun = "Model" if len(models) == 1 else "Models"
    return ". ".join(
        [
            f"{noun} {words.listed(models)}",
            f"Workload {words.listed(sorted(set(table['workload'])))}: {words.listed(texts)}; "
            f"{words.listed(arrivals)}; {seed_text}; KV memory {pools} MiB",
            f"Machine: {data.machine()}",
        ]
    )


def _marks_text(frame: pd.DataFrame) -> str:
    parts = []
    ok = frame["state"] == "ok"
    if (ok & frame["saturated"]).any():
        parts.append("open markers: saturated")
    if (frame["state"] == "failed").any():
        kinds = [
            words.OUTCOMES.get(str(k), str(k))
            for k in sorted(set(frame.loc[frame["state"] == "failed", "failure"].dropna()))
        ]
        parts.append(f"crosses: failed ({words.listed(kinds)})")
    if (frame["state"] == "gated").any():
        reasons = sorted(
            {r for text in frame.loc[frame["state"] == "gated", "failure"].dropna() for r in str(text).split(";") if r}
        )
        parts.append(f"⊘: INVALID, value not shown ({words.listed(reasons)})")
    if (ok & frame["starred"]).any():
        parts.append("faint points: too few samples for this percentile (starred), not to be quoted")
    if "infinite" in frame and (ok & frame["infinite"]).any():
        parts.append("arrows: failures push this percentile to infinity")
    if not parts:
        return ""
    text = "; ".join(parts)
    return text[0].upper() + text[1:]


def _caption(*sentences: str) -> str:
    return " ".join(f"{sentence.rstrip('.')}." for sentence in sentences if sentence)


# --- against the load ----------------------------------------------------------------------------


def _panels(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Split points into panels by what may not share axes; a title names only what differs."""
    keys = ["model", "workload_key", "load", "kv_memory_mib", "hardware"]
    below_full = sorted({float(b) for b in frame["budget_share"] if b < 1})
    crowded = len(below_full) > 3
    parts: list[tuple[dict[str, str], pd.DataFrame]] = []
    for _, part in frame.groupby(keys, sort=True, dropna=False):
        first = part.iloc[0]
        name = {
            "model": str(first["model"]),
            "workload": _workload_label(first, frame),
            "load": str(first["load"]),
            "memory": f"KV {words.plain(first['kv_memory_mib'])} MiB",
            "hardware": str(first["hardware"]),
        }
        if crowded:
            for budget in below_full:
                kept = part[(part["budget_share"] == budget) | (part["budget_share"] == 1)]
                if (kept["budget_share"] == budget).any():
                    parts.append(({**name, "budget": f"b = {words.plain(budget)}"}, kept))
        else:
            parts.append((name, part))
    titles = []
    for name, _ in parts:
        differing = [value for key, value in name.items() if len({other.get(key) for other, _ in parts}) > 1]
        titles.append(", ".join(differing))
    return [(title, part) for title, (_, part) in zip(titles, parts, strict=True)]


def _workload_label(row: pd.Series, frame: pd.DataFrame) -> str:
    return words.workload(row, frame[frame["workload"] == row["workload"]])


def _against_load(data: StudyData, metric: str, what: str) -> Drawn:
    """One line a framework (and budget), a point a load."""
    frame = data.metric(metric)
    frame = frame[frame["state"] != "missing"] if not frame.empty else frame
    if frame.empty:
        return _empty(f"no measured cell of this study has {metric}")
    shown = data.shown(metric)
    panels = _panels(frame)
    cut = len(panels) - MOST_PANELS
    panels = panels[:MOST_PANELS]
    drawing, axes_list, wide = _grid(len(panels))
    lines = data.lines(frame)
    for axes, (title, part) in zip(axes_list, panels, strict=True):
        x = "rate" if part["rate"].notna().any() else "concurrency"
        _draw_lines(axes, part, x, lines, shown.factor)
        axes.set_title(_wrapped(title, 34))
        axes.set_xlabel("offered rate (requests/s)" if x == "rate" else "requests in flight (closed loop)")
        if axes.get_subplotspec().is_first_col():  # type: ignore[union-attr]
            axes.set_ylabel(_wrapped(shown.axis, 20) if len(panels) > 1 else shown.axis)
    ok = frame["state"] == "ok"
    _legend(
        drawing,
        [_line_handle(*line) for line in lines]
        + _mark_handles(
            bool((ok & frame["saturated"]).any()),
            bool((frame["state"] == "failed").any()),
            bool((frame["state"] == "gated").any()),
            bool((ok & frame["starred"]).any()),
        ),
        wide,
    )
    caption = _caption(
        what,
        _samples_text(data, frame),
        _interval_text(frame),
        _marks_text(frame),
        f"{cut} further panels are in the tables" if cut > 0 else "",
        _setting_text(data, frame),
    )
    return Drawn(drawing, caption, wide)


def _draw_lines(
    axes: Axes,
    part: pd.DataFrame,
    x: str,
    lines: list[tuple[str, str, int]],
    factor: float,
) -> None:
    values: list[float] = []
    slots: dict[float, int] = {}
    present = [line for line in lines if (part["series"] == line[0]).any()]
    for place, (label, name, variant) in enumerate(present):
        look = style.look(name)
        # Lines stand a little apart sideways, so that equal results do not hide each other.
        aside = ScaledTranslation(
            (place - (len(present) - 1) / 2) * min(2.2, 9 / len(present)) / 72, 0, axes.figure.dpi_scale_trans
        )
        beside = axes.transData + aside
        mine = part[part["series"] == label].sort_values(x)
        good = mine[(mine["state"] == "ok") & mine["value"].notna()]
        firm = good[~good["starred"]]
        dash = style.DASHES[variant % len(style.DASHES)]
        axes.plot(firm[x], firm["value"] * factor, color=look.colour, linestyle=dash, transform=beside, zorder=3)
        for starred, alpha in ((False, 1.0), (True, 0.4)):
            for saturated in (False, True):
                some = good[(good["starred"] == starred) & (good["saturated"] == saturated)]
                if some.empty:
                    continue
                axes.errorbar(
                    some[x],
                    some["value"] * factor,
                    yerr=_errors(some, factor),
                    color=look.colour,
                    marker=look.marker,
                    markerfacecolor="white" if saturated else look.colour,
                    linestyle="",
                    elinewidth=0.8,
                    capsize=1.8,
                    capthick=0.8,
                    alpha=alpha,
                    transform=beside,
                    zorder=4,
                )
        values += [float(v) for v in pd.concat([good["value"], good["low"], good["high"]]).dropna() * factor]
        bad = mine[mine["state"].isin(["failed", "gated"]) | ((mine["state"] == "ok") & mine["infinite"])]
        for row in bad.itertuples(index=False):
            at = float(getattr(row, x))
            slot = slots[at] = slots.get(at, -1) + 1
            marker = {"failed": style.FAILED_MARKER, "gated": style.GATED_MARKER}.get(str(row.state), "^")
            axes.plot(
                [at],
                [1 - _STRIP * (slot + 0.5)],
                transform=axes.get_xaxis_transform(),
                color=look.colour,
                marker=marker,
                markersize=5.5 if marker == style.GATED_MARKER else 4.5,
                linestyle="",
                clip_on=False,
                zorder=5,
            )
    _scale_y(axes, values, reserved=_STRIP * (max(slots.values(), default=-1) + 1))
    _ticks(axes, [float(v) for v in part[x].dropna()])


@figure("throughput_vs_rate", "Throughput against load")
def throughput_vs_rate(data: StudyData) -> Drawn:
    """Output tokens a second in the steady window."""
    return _against_load(
        data,
        "throughput.output",
        "Output tokens per second in the steady window against the load",
    )


@figure("ttft_vs_rate", "Time to first token against load")
def ttft_vs_rate(data: StudyData) -> Drawn:
    """Median TTFT; the clock starts at the scheduled arrival."""
    return _against_load(
        data,
        "ttft.p50",
        "Median time to first token (TTFT), from the scheduled arrival, against the load",
    )


@figure("tpot_vs_rate", "Time per output token against load")
def tpot_vs_rate(data: StudyData) -> Drawn:
    """Median TPOT."""
    return _against_load(
        data,
        "tpot.p50",
        "Median time per output token after the first (TPOT) against the load",
    )


@figure("e2el_vs_rate", "End-to-end latency against load")
def e2el_vs_rate(data: StudyData) -> Drawn:
    """Median E2EL."""
    return _against_load(
        data,
        "e2el.p50",
        "Median end-to-end latency (E2EL), from the scheduled arrival to the last token, against the load",
    )


# --- memory --------------------------------------------------------------------------------------


def memory_bytes(frame: pd.DataFrame, kind: str, tier: str) -> pd.Series:
    """The largest recorded bytes of a kind on a tier, a value a row; NaN where none was recorded."""
    names = [f"memory.{kind}_peak.{tier}", f"memory.{kind}.{tier}"]
    found = [name for name in names if name in frame]
    if not found:
        return pd.Series(np.nan, index=frame.index)
    return frame[found].max(axis=1)


@figure("kv_memory", "KV memory, reserved and live")
def kv_memory(data: StudyData) -> Drawn:
    """Reserved and live KV on device and host, and the process total, a row a deployment."""
    cells = data.usable()
    simulated = cells[cells["source"] == "simulated"]
    cells = cells[cells["source"] != "simulated"]
    kinds = [(kind, tier) for kind in ("kv_reserved", "kv_live", "process") for tier in ("device", "host")]
    frame = cells[["deployment", "model", "kv_memory_mib", "framework", "budget_share", "series"]].copy()
    for kind, tier in kinds:
        frame[f"{kind}.{tier}"] = memory_bytes(cells, kind, tier) / MIB
    names = [f"{kind}.{tier}" for kind, tier in kinds]
    if frame.empty or frame[names].isna().all().all():
        return _empty("no valid cell of this study recorded the memory of a policy that frees it for real")
    first = frame.groupby("deployment", sort=False)[
        ["model", "kv_memory_mib", "framework", "budget_share", "series"]
    ].first()
    rows = first.join(frame.groupby("deployment", sort=False)[names].max()).reset_index()
    rows["_rank"] = [style.rank(str(name)) for name in rows["framework"]]
    rows = rows.sort_values(
        ["model", "kv_memory_mib", "_rank", "budget_share", "series"],
        ascending=[True, True, True, False, True],
    )
    most = 36
    cut = len(rows) - most
    rows = rows.head(most)
    several = [key for key in ("model", "kv_memory_mib") if rows[key].nunique() > 1]
    labels = []
    for _, row in rows.iterrows():
        extra = [str(row["model"])] if "model" in several else []
        extra += [f"pool {words.plain(row['kv_memory_mib'])} MiB"] if "kv_memory_mib" in several else []
        labels.append(", ".join([str(row["series"]), *extra]))
    drawing = _memory_bars(rows, labels)
    note = ""
    if len(simulated):
        names_text = words.listed(sorted({words.framework(str(name)) for name in simulated["framework"]}))
        note = f"Left out: {words.count(len(simulated), 'simulated cell')} ({names_text}), which free nothing"
    table = data.table[data.table["deployment"].isin(set(rows["deployment"]))]
    caption = _caption(
        "Memory by deployment, never mixed: the KV pool that is reserved (light), the most KV entries in use "
        "at any time over all valid loads × bytes an entry (dark), on the device and on the host where a "
        "framework holds any there, and the peak of the whole server process",
        "Reserved says what was set aside, live what the strategy needed",
        note,
        f"{cut} further deployments are in the tables" if cut > 0 else "",
        _setting_text(data, table),
    )
    return Drawn(drawing, caption, True)


def _memory_bars(rows: pd.DataFrame, labels: list[str]) -> Figure:
    panels = [("KV cache, device", "kv_reserved.device", "kv_live.device")]
    panels.append(("KV cache, host", "kv_reserved.host", "kv_live.host"))
    panels = [p for p in panels if rows[[p[1], p[2]]].fillna(0).to_numpy().any()]
    for tier, title in (("device", "process, device"), ("host", "process, resident")):
        if rows[f"process.{tier}"].notna().any():
            panels.append((title, "", f"process.{tier}"))
    height = 0.75 + 0.24 * len(rows)
    drawing, grid = plt.subplots(1, len(panels), figsize=(style.PAGE, height), sharey=True, squeeze=False)
    places = np.arange(len(rows))[::-1]
    colours = [style.look(str(name)).colour for name in rows["framework"]]
    for axes, (title, reserved, live) in zip(grid.flat, panels, strict=True):
        if reserved:
            light = rows[reserved].fillna(0).to_numpy(dtype=float)
            some = light > 0
            axes.barh(places[some], light[some], height=0.74, color="#E6E6E6", edgecolor="#777777", linewidth=0.5)
        dark = rows[live].to_numpy(dtype=float)
        axes.barh(places, np.nan_to_num(dark), height=0.4 if reserved else 0.6, color=colours, edgecolor="none")
        top = float(np.nanmax([*np.nan_to_num(dark), *(rows[reserved].fillna(0) if reserved else [0.0])]))
        axes.set_xlim(0, top * 1.24 if top else 1)
        for place, value, behind in zip(places, dark, rows[reserved].fillna(0) if reserved else dark, strict=True):
            text = words.number(float(value)) if np.isfinite(value) else "none"
            at = max(float(np.nan_to_num(value)), float(np.nan_to_num(behind)))
            axes.annotate(
                text,
                (at, place),
                (2, 0),
                textcoords="offset points",
                va="center",
                fontsize=6,
                color="#333333",
            )
        axes.set_title(title)
        axes.set_xlabel("MiB")
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", visible=True)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
    grid.flat[0].set_yticks(places, labels)
    grid.flat[0].set_ylim(-0.6, len(rows) - 0.4)
    handles = [
        Patch(facecolor="#E6E6E6", edgecolor="#777777", linewidth=0.5, label="reserved"),
        Patch(facecolor=style.GREY, label="live or resident, peak (labelled)"),
    ]
    _legend(drawing, handles, True)
    return drawing


@figure("budget_effect", "Effect of the KV budget")
def budget_effect(data: StudyData) -> Drawn:
    """Throughput, TPOT and live KV against the share of entries attended, measured and nominal."""
    frame = data.points
    if not frame.empty:
        frame = frame[frame["state"] == "ok"]
    if frame.empty or not (frame["budget_share"] < 1).any():
        return _empty("no valid cell of this study has a KV budget below 1")
    memory = _memory_points(data)
    columns = [
        ("throughput.output", frame[frame["metric"] == "throughput.output"]),
        ("tpot.p50", frame[(frame["metric"] == "tpot.p50") & ~frame["starred"]]),
        ("KV live, device", memory["device"]),
    ]
    if memory["host"]["value"].fillna(0).gt(0).any():
        columns.append(("KV live, host", memory["host"]))
    groups = _budget_groups(frame)[:4]
    drawing, grid = plt.subplots(
        len(groups),
        len(columns),
        figsize=(style.PAGE, 1.95 * len(groups) + 0.45),
        squeeze=False,
    )
    used = []
    shows_nominal = False
    for axes_row, (title, chosen) in zip(grid, groups, strict=True):
        for axes, (metric, part) in zip(axes_row, columns, strict=True):
            part = part[part["point"].isin(chosen)]
            shown = data.shown(metric) if "." in metric else words.Display(metric, "MiB")
            shows_nominal |= _draw_budget(axes, part, shown.factor)
            axes.set_ylabel(shown.axis)
            axes.set_xlabel("share of KV attended")
        if len(groups) > 1:
            # Out of the layout: a long title must not widen its column.
            axes_row[0].set_title(title, loc="left").set_in_layout(False)
        used.append(frame[frame["point"].isin(chosen)])
    everything = pd.concat(used)
    handles = [_line_handle(label, name, 0) for label, name in _families(everything)]
    if shows_nominal:
        handles.append(Line2D([], [], color=style.GREY, marker="|", linestyle=(0, (1, 1)), label="nominal budget"))
    _legend(drawing, handles, True)
    loads = words.listed(dict.fromkeys(title for title, _ in groups))
    caption = _caption(
        "Throughput, median time per output token and peak live KV against the share of KV entries that a "
        "decode step attends to. Points stand at the measured share, ticks at the nominal budget; frameworks "
        "without a budget stand at 1",
        f"Load: {loads}",
        _interval_text(everything[everything["metric"].isin(["throughput.output", "tpot.p50"])]),
        _setting_text(data, everything),
    )
    return Drawn(drawing, caption, True)


def _families(frame: pd.DataFrame) -> list[tuple[str, str]]:
    names = sorted(set(frame["framework"]), key=lambda name: style.rank(str(name)))
    return [(words.framework(str(name)), str(name)) for name in names]


def _memory_points(data: StudyData) -> dict[str, pd.DataFrame]:
    """Peak live KV of each point in MiB, by tier, with the range over its seeds."""
    cells = data.usable()
    cells = cells[cells["source"] != "simulated"]
    out = {}
    for tier in ("device", "host"):
        part = cells[["point", "framework", "budget_share", "budget_attended", "saturated"]].copy()
        part["value"] = memory_bytes(cells, "kv_live", tier) / MIB
        groups = part.groupby("point", sort=False)
        frame = groups[["framework", "budget_share", "budget_attended", "saturated"]].first()
        frame["value"] = groups["value"].mean()
        frame["low"], frame["high"] = groups["value"].min(), groups["value"].max()
        out[tier] = frame.reset_index()
    return out


def _budget_groups(frame: pd.DataFrame) -> list[tuple[str, set[str]]]:
    """For each model and workload the load at which most budgets were measured (the highest of those)."""
    groups = []
    keys = ["model", "workload_key", "kv_memory_mib", "hardware"]
    for _, part in frame.groupby(keys, sort=True):
        best: tuple[tuple[int, float], str, set[str]] | None = None
        for _, at in part.groupby(["load", "rate", "concurrency"], dropna=False):
            below = at[at["budget_share"] < 1]
            if below.empty:
                continue
            first = at.iloc[0]
            what = words.load(first["rate"], first["concurrency"])
            key = (int(below["series"].nunique()), words.level(first["rate"], first["concurrency"]))
            if best is None or key > best[0]:
                named = [str(first["model"])] if frame["model"].nunique() > 1 else []
                if frame["workload_key"].nunique() > 1:
                    named.append(_workload_label(first, frame))
                if frame["kv_memory_mib"].nunique() > 1:
                    named.append(f"KV {words.plain(first['kv_memory_mib'])} MiB")
                best = (key, ", ".join([*named, what]), set(at["point"]))
        if best is not None:
            groups.append((best[1], best[2]))
    return groups


def _draw_budget(axes: Axes, part: pd.DataFrame, factor: float) -> bool:
    """Draw a line a framework; returns whether a nominal budget was drawn apart from the measured one."""
    values: list[float] = []
    apart = False
    families = _families(part)
    for place, (label, name) in enumerate(families):
        look = style.look(name)
        aside = (place - (len(families) - 1) / 2) * 0.012
        mine = part[(part["framework"] == name) & part["value"].notna()].copy()
        mine["x"] = mine["budget_attended"].fillna(mine["budget_share"])
        mine = mine.sort_values("x")
        if mine.empty:
            continue
        y = mine["value"].to_numpy(dtype=float) * factor
        ends = pd.concat([mine["value"], mine["low"], mine["high"]]).dropna()
        values += [float(v) for v in ends * factor]
        if len(mine) == 1 and mine["budget_share"].iloc[0] == 1:
            axes.axhline(y[0], color=look.colour, linewidth=0.7, linestyle=(0, (1, 2)), zorder=2)
        axes.errorbar(
            mine["x"] + aside,
            y,
            yerr=_errors(mine, factor),
            color=look.colour,
            marker=look.marker,
            elinewidth=0.8,
            capsize=1.8,
            capthick=0.8,
            label=label,
            zorder=4,
        )
        for at, nominal, value in zip(mine["x"] + aside, mine["budget_share"], y, strict=True):
            if abs(at - aside - nominal) > 0.005:
                apart = True
                axes.plot([nominal, at], [value, value], color=look.colour, lw=0.7, ls=(0, (1, 1)), zorder=2)
                axes.plot([nominal], [value], color=look.colour, marker="|", ms=6, zorder=3)
    if not values:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", color=style.GREY)
    axes.set_xlim(0, 1.06)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
    _scale_y(axes, values)
    return apart


@figure("memory_timeline", "KV memory over time")
def memory_timeline(data: StudyData) -> Drawn:
    """KV live and reserved, and the process, second by second, of one load and seed."""
    cells = data.usable()
    cells = cells[cells["source"] != "simulated"]
    chosen = _timeline_cells(cells)
    frames = {}
    for row in chosen.itertuples(index=False):
        path = data.cell_dir(str(row.cell)) / MEMORY
        if path.is_file():
            timeline = pd.read_parquet(path)
            if not timeline.empty:
                frames[str(row.series)] = timeline
    if not frames:
        return _empty("no valid cell of this study has a memory timeline")
    wanted = [
        ("KV cache, device", ("kv_live", "kv_reserved"), "device"),
        ("KV cache, host", ("kv_live", "kv_reserved"), "host"),
        ("process, device", ("process",), "device"),
        ("process, resident", ("process",), "host"),
    ]
    panels = [
        panel
        for panel in wanted
        if any(((f["kind"].isin(panel[1])) & (f["tier"] == panel[2]) & (f["bytes"] > 0)).any() for f in frames.values())
    ]
    if not panels:
        return _empty("the memory timelines of this study hold neither KV nor process bytes")
    drawing, axes_list, wide = _grid(len(panels))
    lines = [line for line in data.lines(chosen) if line[0] in frames]
    for axes, (title, kinds, tier) in zip(axes_list, panels, strict=True):
        top = 0.0
        for label, name, variant in lines:
            for kind in kinds:
                part = frames[label]
                part = part[(part["kind"] == kind) & (part["tier"] == tier)].sort_values("t_s")
                if part.empty:
                    continue
                reserved = kind == "kv_reserved"
                axes.plot(
                    part["t_s"],
                    part["bytes"] / MIB,
                    color=style.look(name).colour,
                    linestyle=(0, (1, 2)) if reserved else style.DASHES[variant % len(style.DASHES)],
                    linewidth=0.9,
                    drawstyle="steps-post",
                    alpha=0.8 if reserved else 1,
                )
                top = max(top, float(part["bytes"].max()) / MIB)
        axes.set_title(title)
        axes.set_xlabel("time since the load began (s)")
        axes.set_ylabel("MiB")
        axes.set_ylim(0, top * 1.1 or 1)
        axes.set_xlim(left=0)
    handles = [_line_handle(*line, marker=False) for line in lines]
    handles.append(Line2D([], [], color=style.GREY, linestyle=(0, (1, 2)), label="reserved"))
    _legend(drawing, handles, wide)
    first = chosen.iloc[0]
    at = words.load(first["rate"], first["concurrency"])
    caption = _caption(
        f"Memory over the course of one load ({at}, seed {int(first['seed'])}): KV entries in use × bytes an "
        "entry (solid or dashed), the pool reserved for them (dotted), and the server process",
        _setting_text(data, chosen),
    )
    return Drawn(drawing, caption, wide)


def _timeline_cells(cells: pd.DataFrame) -> pd.DataFrame:
    """Cells of one setting, a cell a line: the highest load at which most lines have a result."""
    settings = [part.drop_duplicates("series") for _, part in cells.groupby("setting", sort=True)]
    if not settings:
        return cells
    enough = 0.75 * max(len(part) for part in settings)

    def level(part: pd.DataFrame) -> tuple[float, int, int]:
        first = part.iloc[0]
        return (words.level(first["rate"], first["concurrency"]), len(part), -int(first["seed"]))

    part = max((part for part in settings if len(part) >= enough), key=level)
    return part if len(part) <= 8 else part.drop_duplicates("framework")


# --- command line --------------------------------------------------------------------------------


def write(name: str, data: StudyData, out_dir: Path) -> Drawn:
    """Draw a figure and write its files; returns what was drawn."""
    drawn = draw(name, data)
    style.save(drawn.figure, out_dir / name)
    write_text(out_dir / f"{name}.caption.txt", drawn.caption + "\n")
    write_text(out_dir / f"{name}.caption.rst", drawn.caption.replace("*", "\\*") + "\n")
    return drawn


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="kvstudy.report.figures", description="Draw figures of a study.")
    parser.add_argument("names", nargs="+", metavar="NAME", help=f"all, or of: {', '.join(FIGURES)}")
    parser.add_argument("--study-dir", type=Path, required=True, help="folder that holds cells.parquet")
    parser.add_argument("--results", type=Path, help="results folder (default: the study folder's parent)")
    parser.add_argument("--out-dir", type=Path, help="default: figures/ in the study folder")
    options = parser.parse_args(argv)
    names = list(FIGURES) if options.names == ["all"] else options.names
    out_dir = options.out_dir or options.study_dir / "figures"
    try:
        data = StudyData.load(options.study_dir, options.results)
        for name in names:
            write(name, data, out_dir)
            print(f"{name} -> {out_dir / name}.pdf")
    except AnalysisError as error:
        print(f"kvstudy: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
