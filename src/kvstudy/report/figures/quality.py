"""What a budget costs in quality: against the measured budget, against memory and time, and over where a fact lay."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from kvstudy.report import style, words
from kvstudy.report.data import StudyData, told_apart
from kvstudy.report.figures.captions import joined
from kvstudy.report.figures.drawing import empty, errors, grid, legend, line_handle
from kvstudy.report.figures.registry import Drawn, figure
from kvstudy.report.words import MIB

#: Measures that are drawn against the budget, those that a study has, and how an axis names them.
DRAWN = {
    "perplexity": "perplexity",
    "kl": "KL from the full cache (nats)",
    "retention_strict": "fact recalled (share)",
    "length_drift": "longer answers (tokens)",
}
#: Perplexities beyond so many times the least are not drawn.
CUT = 12.0
CUT_TEXT = f"Perplexities beyond {CUT:g} times the least are above the panel"
NONE = "this study scored no quality of pretrained weights"
KEYS = ["line", "framework", "budget", "budget_of", "deployment"]


def scored(data: StudyData) -> pd.DataFrame:
    """Rows that may be shown, valid and of pretrained weights (random ones have no quality), by `line`."""
    frame = data.quality
    frame = frame[(frame["verdict"] == "VALID") & (frame["weights"] == "pretrained")]
    return frame.assign(line=told_apart(frame))


def _order(frame: pd.DataFrame) -> list[tuple[str, str, int]]:
    """Lines of a frame in the order of a legend: name, framework, and its number among the framework's."""
    found: list[tuple[str, str, int]] = []
    pairs = frame[["line", "framework"]].drop_duplicates().itertuples(index=False)
    for line, framework in sorted(pairs, key=lambda pair: (style.rank(str(pair[1])), str(pair[0]))):
        number = sum(of == framework for _, of, _ in found)
        found.append((str(line), str(framework), number))
    return found


def _at_longest(frame: pd.DataFrame, measure: str) -> pd.DataFrame:
    """A measure at the longest context that as many deployments as any have, over all depths."""
    part = frame[(frame["measure"] == measure) & frame["depth"].isna()]
    if part.empty:
        return part
    counts = part.groupby("context")["deployment"].nunique()
    longest = int(counts[counts == counts.max()].index.max())
    return part.loc[part["context"] == longest]


def _with_ceiling(frame: pd.DataFrame) -> pd.DataFrame:
    """Retention at the longest context at which the full cache still recalls half: beyond, the model itself fails."""
    part = frame[frame["measure"].eq("retention_strict") & frame["depth"].isna()]
    full = part[part["framework"].isin(["full", "vllm"]) & (part["value"] >= 0.5)]
    return part[part["context"] == full["context"].max()] if len(full) else _at_longest(frame, "retention_strict")


def _shown(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    parts = {name: _at_longest(frame, name) for name in DRAWN}
    parts["retention_strict"] = _with_ceiling(frame)
    return {name: part for name, part in parts.items() if len(part)}


@figure("quality_vs_budget", "Quality against the measured budget")
def quality_vs_budget(data: StudyData) -> Drawn:
    """Each measure against the share attended to, and against the bytes held of a request."""
    frame = scored(data)
    parts = _shown(frame)
    if not parts:
        return empty(NONE)
    order = _order(frame)
    drawing, rows = plt.subplots(2, len(parts), figsize=(style.PAGE, 4.3), squeeze=False, sharey="col")
    for column, (measure, part) in enumerate(parts.items()):
        for row, (x, label) in enumerate(
            (("attended_share", "share of KV attended"), ("kv_bytes", "KV held, both tiers (MiB)"))
        ):
            axes = rows[row][column]
            _lines(axes, part, order, x, 1.0 if x == "attended_share" else 1.0 / MIB)
            axes.set_xlabel(label)
            axes.set_ylabel(DRAWN[measure])
            if measure == "perplexity":
                _perplexities(axes, part["value"])
            elif measure == "kl" and (part["value"] > 0).any():
                _plain_log(axes)
        rows[0][column].set_title(f"context {int(part['context'].iloc[0]):,}", loc="left")
    legend(drawing, [_handle(*line) for line in order], True)
    caption = joined(
        "Quality against the share of KV entries that a decode step attends to (above) and the KV bytes held of a "
        "request once its prompt has ended, device and host together (below), both measured",
        "Each deployment scored the same items, decoded token by token under its policy after the context was "
        "prefilled and compressed",
        CUT_TEXT,
        "Recall is shown at the longest context at which the full cache recalls at least half",
        "Bars: 95 % intervals over items; the difference from the full cache, item by item, is in the table",
        _texts(frame),
    )
    return Drawn(drawing, caption, True)


def _handle(line: str, framework: str, variant: int) -> Line2D:
    handle = line_handle(line, framework, variant)
    handle.set_marker(style.marker(framework, variant))
    return handle


def _lines(axes: Axes, part: pd.DataFrame, order: Sequence[tuple[str, str, int]], x: str, factor: float) -> None:
    for line, name, variant in order:
        look = style.look(name)
        mine = (
            part[part["line"] == line]
            .groupby(KEYS, dropna=False, as_index=False)[["value", "low", "high", x]]
            .mean(numeric_only=True)
        )
        mine = mine.sort_values(x)
        if len(mine) == 1 and name in ("full", "vllm"):
            axes.axhline(mine["value"].iloc[0], color=look.colour, linewidth=0.7, linestyle=(0, (1, 2)), zorder=2)
        axes.errorbar(
            mine[x] * factor,
            mine["value"],
            yerr=errors(mine, 1.0),
            color=look.colour,
            marker=style.marker(name, variant),
            linestyle=style.DASHES[variant % len(style.DASHES)],
            markersize=3.4,
            linewidth=0.9,
            elinewidth=0.5,
            zorder=4,
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: words.plain(value)))
    axes.xaxis.set_minor_locator(NullLocator())
    if x == "attended_share":
        axes.xaxis.set_major_locator(FixedLocator([0.02, 0.05, 0.1, 0.2, 0.5, 1.0]))


def _perplexities(axes: Axes, values: pd.Series) -> None:
    """A log axis where they span much, cut where the text is lost: what is above would squeeze what is to be read."""
    least, most = float(values.min()), float(values.max())
    if most > 4 * least:
        _plain_log(axes)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.set_ylim(0.8 * least, min(1.25 * most, CUT * least))


def _plain_log(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: words.plain(value)))
    axes.yaxis.set_minor_locator(NullLocator())


def _texts(frame: pd.DataFrame) -> str:
    models = words.listed(sorted(set(frame["model"].astype(str))))
    return (
        f"Model {models}, suite {words.listed(sorted(set(frame['quality'].astype(str))))}; the text is the Python "
        "documentation unless the suite names another: the model has probably seen it, which lowers every perplexity "
        "alike"
    )


@figure("pareto", "Quality, memory and time")
def pareto(data: StudyData) -> Drawn:
    """One point a deployment: perplexity against KV bytes and TPOT; filled where no other is better in all three."""
    frame = scored(data)
    part = _at_longest(frame, "perplexity")
    cells = data.usable()
    if part.empty or "tpot.p50" not in cells:
        return empty(NONE if part.empty else "no valid cell of this study measured TPOT")
    part = part.assign(same=_whatever_its_memory(part, part["budget"]))
    timed = cells[cells["tpot.p50"].notna() & ~cells["tpot.p50.starred"]]
    timed = timed.assign(
        same=_whatever_its_memory(timed, timed["budget_share"]),
        level=timed["rate"].fillna(timed["concurrency"]),
    )
    timed = timed[timed["same"].isin(part["same"])]
    points = part.groupby([*KEYS, "same"], dropna=False, as_index=False)[["value", "kv_bytes"]].mean()
    if not timed.empty:
        # Times under one load only: that under which most of them were measured, the lightest of those.
        settings = timed.groupby(["workload_key", "load", "kv_memory_mib", "hardware", "level"], dropna=False)
        _, timed = max(settings, key=lambda one: (one[1]["same"].nunique(), -float(one[1]["level"].iloc[0])))
    points["tpot"] = points["same"].map(timed.groupby("same")["tpot.p50"].mean())
    points = points.dropna(subset=["tpot"]).reset_index(drop=True)
    if points.empty:
        return empty("no deployment of this study has both a valid TPOT and a valid perplexity")
    order = _order(points)
    marks = {line: style.marker(framework, variant) for line, framework, variant in order}
    points["best"] = _undominated(points[["value", "kv_bytes", "tpot"]].to_numpy(dtype=float))
    drawing, (left, right) = plt.subplots(1, 2, figsize=(style.PAGE, 2.9), sharey=True)
    for axes, x, factor, label in (
        (left, "kv_bytes", 1 / MIB, "KV held of a request, both tiers (MiB)"),
        (right, "tpot", 1e3, "median TPOT (ms)"),
    ):
        for row in points.sort_values("best").to_dict("records"):
            look = style.look(str(row["framework"]))
            best, budget = bool(row["best"]), float(row["budget"])
            at, value = float(row[x]) * factor, float(row["value"])
            axes.plot(
                [at],
                [value],
                marker=marks[str(row["line"])],
                linestyle="",
                color=look.colour,
                markerfacecolor=look.colour if best else "white",
                alpha=1.0 if best else 0.45,
                zorder=5 if best else 3,
            )
            if best and budget < 1 and value < CUT * float(points["value"].min()):
                near = {"xytext": (3, 3), "textcoords": "offset points", "fontsize": 5.5}
                axes.annotate(words.plain(budget), (at, value), **near)
        axes.set_xlabel(label)
    left.set_ylabel("perplexity")
    _perplexities(left, points["value"])
    handles = [_handle(*line) for line in order]
    for handle in handles:
        handle.set_linestyle("")
    handles.append(
        Line2D([], [], color=style.GREY, marker="o", mfc="white", alpha=0.5, linestyle="", label="dominated")
    )
    legend(drawing, handles, True)
    caption = joined(
        f"One point a deployment: perplexity after {int(part['context'].iloc[0]):,} tokens of context against the KV "
        f"bytes held of a request and the median time per output token at {words.load(timed.iloc[0])} "
        f"({words.workload(timed.iloc[0], cells)}, {words.plain(timed['kv_memory_mib'].iloc[0])} MiB of KV memory)",
        "Filled: no other deployment is at least as good in quality, KV bytes and TPOT and better in one (the Pareto "
        "front of all three); numbers are nominal budgets. Values are compared as measured, without their intervals",
        CUT_TEXT,
        _texts(frame),
    )
    return Drawn(drawing, caption, True)


def _whatever_its_memory(frame: pd.DataFrame, budget: pd.Series) -> pd.Series:
    """What names a deployment but for its KV memory, on which no score depends: it may be timed in a smaller one."""
    names = frame[["framework", "implementation", "rule", "variant", "model", "budget_of"]].fillna("").astype(str)
    return names.agg(" ".join, axis=1) + budget.map(" {:g}".format)


def _undominated(costs: np.ndarray) -> list[bool]:
    """Rows that no other row equals or betters in every column and betters in one; less is better."""
    return [not any((other <= mine).all() and (other < mine).any() for other in costs) for mine in costs]


@figure("retention_map", "Recall of a fact by distance")
def retention_map(data: StudyData) -> Drawn:
    """Share of facts recalled by the length of the conversation and where in it the fact was told."""
    frame = scored(data)
    frame = frame[frame["measure"].eq("retention") & frame["depth"].notna()]
    if frame.empty:
        return empty("this study asked for no fact at several depths")
    lines = _panels(frame)
    drawing, panels, wide = grid(len(lines), 1.6)
    contexts = sorted(set(frame["context"]))
    depths = sorted(set(frame["depth"]))
    for axes, (title, part) in zip(panels, lines, strict=True):
        table = part.groupby(["depth", "context"])["value"].mean().unstack().reindex(index=depths, columns=contexts)
        values = table.to_numpy(dtype=float)
        axes.imshow(values, vmin=0, vmax=1, cmap="cividis", aspect="auto", origin="upper")
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                colour = "white" if value < 0.6 else "black"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=5.5, color=colour)
        axes.set_xticks(range(len(contexts)), [f"{context:,}" for context in contexts])
        axes.set_yticks(range(len(depths)), [words.plain(depth) for depth in depths])
        axes.grid(visible=False)
        axes.set_title(title, loc="left")
        axes.set_xlabel("conversation (tokens)")
        axes.set_ylabel("told at (0: start)")
    counts = frame["n"]
    caption = joined(
        "Share of facts that the answer contains (the paper's substring test) by the length of the conversation and "
        f"where in it the fact was told; n = {int(counts.min())} facts a field. The full cache's map is the ceiling: "
        "what it does not recall, no policy can be blamed for",
        "Of each policy the budget nearest to 0.2 is shown" if len(lines) > 1 else "",
        _texts(frame),
    )
    return Drawn(drawing, caption, wide)


def _panels(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The full cache, and of each other line the budget nearest to 0.2."""
    lines = []
    for line, _, _ in _order(frame):
        mine = frame[frame["line"] == line]
        budgets = mine["budget"].fillna(0.0)
        nearest = min(set(budgets), key=lambda share: abs(share - 0.2))
        title = line + (f" b={words.plain(nearest)}" if nearest < 1 else "")
        lines.append((title, mine[budgets == nearest]))
    return lines
