"""Throughput and latencies against the load: a line a framework and budget, a point a load."""

from __future__ import annotations

from functools import partial

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.transforms import ScaledTranslation

from kvstudy.report import style, words
from kvstudy.report.data import StudyData, markers_of, series_of
from kvstudy.report.families import AXES, OF_WORKLOAD, families
from kvstudy.report.figures.captions import interval_text, joined, marks_text, samples_text, setting_text
from kvstudy.report.figures.drawing import (
    MOST_PANELS,
    STRIP,
    empty,
    errors,
    grid,
    legend,
    line_handle,
    mark_handles,
    scale_y,
    ticks,
    wrapped,
)
from kvstudy.report.figures.registry import Drawn, figure

#: More budgets than these have panels of their own.
MOST_BUDGETS = 3
#: Classes of requests, and the share of long requests at which all are of the one.
CLASSES = {"short": 0.0, "long": 1.0}


def of_classes(data: StudyData, metric: str, part: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The points of short and of long requests apart, along the share of long ones."""
    family, _, statistic = metric.partition(".")
    found = []
    for name, alone in CLASSES.items():
        own = data.metric(f"{family}.{name}.{statistic}")
        own = own[own["point"].isin(part.loc[part["long_share"].between(0, 1, inclusive="neither"), "point"])]
        if not own.empty:
            # Where all requests are of the class, it has no metric of its own.
            found.append((f"{name} requests", pd.concat([own, part[part["long_share"] == alone]], ignore_index=True)))
    return found


def _panels(data: StudyData, metric: str, frame: pd.DataFrame) -> list[tuple[str, str | None, pd.DataFrame]]:
    """Title, axis and points of each panel; a title names only what differs."""
    below_full = sorted({float(b) for b in frame["budget_share"] if b < 1})
    parts: list[tuple[dict[str, str], str | None, pd.DataFrame]] = []
    along = [("all requests", axis, part) for axis, part in families(frame)]
    mixes = [part for _, axis, part in along if axis == "long_share"]
    along += [(of, "long_share", own) for part in mixes for of, own in of_classes(data, metric, part)]
    for of, axis, part in along:
        first = part.iloc[0]
        others = frame if axis not in OF_WORKLOAD else frame.assign(**{str(axis): first[axis]})
        name = {
            "of": of,
            "model": str(first["model"]),
            "workload": words.workload(first, others),
            "load": _load_of(first, axis),
            "memory": "" if axis == "kv_memory_mib" else f"KV {words.plain(first['kv_memory_mib'])} MiB",
            "hardware": str(first["hardware"]),
        }
        if _crowded(frame):
            for budget in below_full:
                kept = part[(part["budget_share"] == budget) | (part["budget_share"] == 1)]
                if (kept["budget_share"] == budget).any():
                    parts.append(({**name, "budget": f"b = {words.plain(budget)}"}, axis, kept))
        else:
            parts.append((name, axis, part))
    found = []
    for name, axis, part in parts:
        differing = [value for key, value in name.items() if len({other.get(key) for other, _, _ in parts}) > 1]
        found.append((", ".join(value for value in differing if value), axis, part))
    return found


def _crowded(frame: pd.DataFrame) -> bool:
    """Whether there are so many budgets that each has panels of its own."""
    return frame.loc[frame["budget_share"] < 1, "budget_share"].nunique() > MOST_BUDGETS


def _load_of(first: pd.Series, axis: str | None) -> str:
    """The load as a title names it: what its axis does not say."""
    kind = str(first["load"])
    if kind == "burst":
        return "all at once"
    if axis in ("rate", "concurrency"):
        return kind
    arrivals = "" if axis == "burstiness" or kind in ("poisson", "closed") else f"{kind}, "
    return arrivals + words.load(first.drop("burstiness"))


def _against_load(data: StudyData, metric: str, what: str) -> Drawn:
    """One line a framework (and budget), a point a load."""
    frame = data.metric(metric)
    frame = frame[frame["state"] != "missing"] if not frame.empty else frame
    if frame.empty:
        return empty(f"no measured cell of this study has {metric}")
    shown = data.shown(metric)
    panels = _panels(data, metric, frame)
    cut = len(panels) - MOST_PANELS
    panels = panels[:MOST_PANELS]
    apart = [part for _, _, part in panels if (part["metric"] != metric).any()]
    frame = pd.concat([frame, *apart])
    drawing, axes_list, wide = grid(len(panels))
    lines, marks = data.lines(frame), markers_of(data.cells)
    if _crowded(frame):  # titles say the budget, and a line of every panel has one sample in the legend
        lines = series_of(frame.assign(series=frame["line"]))
        panels = [(title, axis, part.assign(series=part["line"])) for title, axis, part in panels]
    for axes, (title, axis, part) in zip(axes_list, panels, strict=True):
        _draw_lines(axes, part.assign(x=part[axis] if axis else 0.0), "x", lines, marks, shown.factor)
        axes.set_title(wrapped(title, 34))
        at_once = axis in (None, "concurrency") and (part["load"] == "burst").all()
        axes.set_xlabel(wrapped("requests at once" if at_once else AXES[axis] if axis else "", 34))
        if axis is None:
            axes.set_xticks([])
        if axes.get_subplotspec().is_first_col():  # type: ignore[union-attr]
            axes.set_ylabel(wrapped(shown.axis, 20) if len(panels) > 1 else shown.axis)
    ok = frame["state"] == "ok"
    legend(
        drawing,
        [line_handle(*line, marks[line[0]]) for line in lines]
        + mark_handles(
            bool((ok & frame["saturated"]).any()),
            bool((frame["state"] == "failed").any()),
            bool((frame["state"] == "gated").any()),
            bool((ok & frame["starred"]).any()),
        ),
        wide,
    )
    # The names of axes without their units; one load without a number is still the load.
    named = dict.fromkeys("the load" if axis in (None, "rate", "concurrency") else AXES[axis] for _, axis, _ in panels)
    caption = joined(
        what.replace("the load", words.listed(name.split(" (")[0] for name in named)),
        samples_text(data, frame),
        interval_text(frame),
        marks_text(frame),
        "Short and long requests of the same cells are shown apart, too" if apart else "",
        f"{cut} further panels are in the tables" if cut > 0 else "",
        setting_text(data, frame),
    )
    return Drawn(drawing, caption, wide)


def _draw_lines(
    axes: Axes,
    part: pd.DataFrame,
    x: str,
    lines: list[tuple[str, str, int]],
    marks: dict[str, str],
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
                    yerr=errors(some, factor),
                    color=look.colour,
                    marker=marks[label],
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
                [1 - STRIP * (slot + 0.5)],
                transform=axes.get_xaxis_transform(),
                color=look.colour,
                marker=marker,
                markersize=5.5 if marker == style.GATED_MARKER else 4.5,
                linestyle="",
                clip_on=False,
                zorder=5,
            )
    scale_y(axes, values, reserved=STRIP * (max(slots.values(), default=-1) + 1))
    ticks(axes, [float(v) for v in part[x].dropna()])


#: Name, title, metric, and what the caption opens with.
_FIGURES = (
    (
        "throughput_vs_rate",
        "Throughput against load",
        "throughput.output",
        "Output tokens per second in the steady window against the load",
    ),
    (
        "ttft_vs_rate",
        "Time to first token against load",
        "ttft.p50",
        "Median time to first token (TTFT), from the scheduled arrival, against the load",
    ),
    (
        "tpot_vs_rate",
        "Time per output token against load",
        "tpot.p50",
        "Median time per output token after the first (TPOT) against the load",
    ),
    (
        "e2el_vs_rate",
        "End-to-end latency against load",
        "e2el.p50",
        "Median end-to-end latency (E2EL), from the scheduled arrival to the last token, against the load",
    ),
)

for _name, _title, _metric, _what in _FIGURES:
    figure(_name, _title)(partial(_against_load, metric=_metric, what=_what))
