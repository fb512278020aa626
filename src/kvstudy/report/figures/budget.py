"""What a KV budget does to throughput, TPOT and live KV, against the share of entries attended."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from kvstudy.report import style, words
from kvstudy.report.data import StudyData, markers_of, memory_bytes, series_of
from kvstudy.report.figures.captions import interval_text, joined, setting_text
from kvstudy.report.figures.drawing import empty, errors, legend, line_handle, scale_y
from kvstudy.report.figures.registry import Drawn, figure
from kvstudy.report.words import MIB


@figure("budget_effect", "Effect of the KV budget")
def budget_effect(data: StudyData) -> Drawn:
    """Throughput, TPOT and live KV against the share of entries attended, measured and nominal."""
    frame = data.points
    if not frame.empty:
        frame = frame[frame["state"] == "ok"]
    if frame.empty or not (frame["budget_share"] < 1).any():
        return empty("no valid cell of this study has a KV budget below 1")
    memory, marks = _memory_points(data), markers_of(data.cells)
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
            shows_nominal |= _draw_budget(axes, part, marks, shown.factor)
            axes.set_ylabel(shown.axis)
            axes.set_xlabel("share of KV attended")
        if len(groups) > 1:
            # Room above for a line that is written over all columns: as a title it would widen the first.
            axes_row[0].set_title(" ", loc="left")
            over = {"xycoords": "axes fraction", "textcoords": "offset points", "annotation_clip": False}
            axes_row[0].annotate(title, (0, 1), (0, 4), fontsize="medium", **over).set_in_layout(False)
        used.append(frame[frame["point"].isin(chosen)])
    everything = pd.concat(used)
    handles = [line_handle(label, name, variant, marks[label]) for label, name, variant in _lines(everything)]
    if shows_nominal:
        handles.append(Line2D([], [], color=style.GREY, marker="|", linestyle=(0, (1, 1)), label="nominal budget"))
    legend(drawing, handles, True)
    loads = words.listed(dict.fromkeys(title for title, _ in groups))
    caption = joined(
        "Throughput, median time per output token and peak live KV against the share of KV entries that a "
        "decode step attends to. Points stand at the measured share, ticks at the nominal budget; frameworks "
        "without a budget stand at 1",
        f"Load: {loads}",
        interval_text(everything[everything["metric"].isin(["throughput.output", "tpot.p50"])]),
        setting_text(data, everything),
    )
    return Drawn(drawing, caption, True)


def _lines(frame: pd.DataFrame) -> list[tuple[str, str, int]]:
    """Lines whatever their budget, as `series_of` tells them."""
    return series_of(frame.assign(series=frame["line"]))


def _memory_points(data: StudyData) -> dict[str, pd.DataFrame]:
    """Peak live KV of each point in MiB, by tier, with the range over its seeds."""
    cells = data.usable()
    cells = cells[cells["source"] != "simulated"]
    out = {}
    for tier in ("device", "host"):
        part = cells[["point", "framework", "line", "budget_share", "budget_attended", "saturated"]].copy()
        part["value"] = memory_bytes(cells, "kv_live", tier) / MIB
        groups = part.groupby("point", sort=False)
        frame = groups[["framework", "line", "budget_share", "budget_attended", "saturated"]].first()
        frame["value"] = groups["value"].mean()
        frame["low"], frame["high"] = groups["value"].min(), groups["value"].max()
        out[tier] = frame.reset_index()
    return out


def _budget_groups(frame: pd.DataFrame) -> list[tuple[str, set[str]]]:
    """For each model and workload the load at which most budgets were measured (the highest of those).

    Those with most budgets come first, real weights before random ones: a figure shows the first few.
    """
    groups = []
    keys = ["model", "workload_key", "kv_memory_mib", "hardware"]
    for _, part in frame.groupby(keys, sort=True):
        best: tuple[tuple[int, float], str, set[str]] | None = None
        for _, at in part.groupby(["load", "rate", "concurrency", "burstiness"], dropna=False):
            below = at[at["budget_share"] < 1]
            if below.empty:
                continue
            first = at.iloc[0]
            what = words.load(first)
            key = (int(below["series"].nunique()), words.level(first["rate"], first["concurrency"]))
            if best is None or key > best[0]:
                named = [str(first["model"])] if frame["model"].nunique() > 1 else []
                if frame["workload_key"].nunique() > 1:
                    named.append(words.workload(first, frame))
                if frame["kv_memory_mib"].nunique() > 1:
                    named.append(f"KV {words.plain(first['kv_memory_mib'])} MiB")
                best = (key, ", ".join([*named, what]), set(at["point"]))
        if best is not None:
            groups.append((-best[0][0], bool((part["weights"] == "random").any()), best[1], best[2]))
    return [(title, chosen) for _, _, title, chosen in sorted(groups, key=lambda group: group[:2])]


def _draw_budget(axes: Axes, part: pd.DataFrame, marks: dict[str, str], factor: float) -> bool:
    """Draw a line a strategy; returns whether a nominal budget was drawn apart from the measured one."""
    values: list[float] = []
    apart = False
    lines = _lines(part)
    for place, (label, name, variant) in enumerate(lines):
        look = style.look(name)
        aside = (place - (len(lines) - 1) / 2) * 0.012
        mine = part[(part["line"] == label) & part["value"].notna()].copy()
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
            yerr=errors(mine, factor),
            color=look.colour,
            marker=marks[label],
            linestyle=style.DASHES[variant % len(style.DASHES)],
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
    scale_y(axes, values)
    return apart
