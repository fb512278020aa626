"""What the figures share in drawing: panels, legends, marks, axes that start where they should."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kvstudy.report import style, words
from kvstudy.report.figures.registry import Drawn

Floats = npt.NDArray[np.float64]

#: Panels of one figure; more are left to the tables, and the caption says so.
MOST_PANELS = 12


def empty(reason: str) -> Drawn:
    """A figure that says in its place why there is no data for it."""
    drawing, axes = plt.subplots(figsize=(style.COLUMN, 1.1))
    axes.set_axis_off()
    axes.text(0.5, 0.5, wrapped(f"No data: {reason}", 56), ha="center", va="center", color=style.GREY)
    return Drawn(drawing, f"No data for this figure: {reason}.")


def wrapped(text: str, width: int) -> str:
    """Text in lines of at most `width` characters."""
    return "\n".join(textwrap.wrap(text, width))


def grid(n: int, height: float = 1.75) -> tuple[Figure, list[Axes], bool]:
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


def legend(drawing: Figure, handles: Sequence[Any], wide: bool) -> None:
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


def line_handle(label: str, name: str, variant: int, marker: str | None = None) -> Line2D:
    """The legend's sample of a line: the framework's look, the variant's dashes, a marker of its own if it has one."""
    look = style.look(name)
    return Line2D(
        [],
        [],
        color=look.colour,
        marker=marker or look.marker,
        linestyle=style.DASHES[variant % len(style.DASHES)],
        label=label,
    )


def mark_handles(saturated: bool, failed: bool, gated: bool, starred: bool) -> list[Line2D]:
    """The legend's samples of the marks that a figure has."""
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


def ticks(axes: Axes, values: Sequence[float]) -> None:
    """Put ticks where the settings are, on a log axis where they span a factor of eight or more."""
    distinct = sorted(set(values))
    if not distinct:
        axes.set_xticks([])  # a load without a level, a recorded trace
        return
    low, high = distinct[0], distinct[-1]
    if low > 0 and high / low >= 8:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
        pad = (high / low) ** 0.08
        axes.set_xlim(low / pad, high * pad)
    else:
        pad = 0.09 * (high - low) or 0.5 * high or 0.5
        axes.set_xlim(low - pad, high + pad)
    if len(distinct) <= 7:
        axes.xaxis.set_major_locator(FixedLocator(distinct))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: words.plain(value)))


#: Height, as a share of the axes, of a row of marks for points that have no value.
STRIP = 0.075


def scale_y(axes: Axes, values: Sequence[float], reserved: float = 0.0) -> None:
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


def errors(part: pd.DataFrame, factor: float) -> Floats:
    """Lengths of the error bars below and above, shape (2, n), as matplotlib takes them."""
    value = part["value"].to_numpy(dtype=float)
    low = np.fmax(value - part["low"].to_numpy(dtype=float), 0)
    high = np.fmax(part["high"].to_numpy(dtype=float) - value, 0)
    ends: Floats = np.nan_to_num(np.vstack([low, high])) * factor
    return ends
