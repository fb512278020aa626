"""The figures of a study, each a function from its data to a drawing and a caption made from the data.

`kvstudy figure NAME --study-dir results/<study>` writes NAME.pdf, NAME.png, NAME.caption.txt and
NAME.caption.rst. A figure that a study has no data for says so in its place; it never fails, so that a
report is always whole. To add one: a function with `@figure(name, title)` in a module here that is imported
below, and its category in `kvstudy.report.FIGURES`.

Honesty is built in once: failed and gated points are marked and never joined, saturated points are open, a
starred percentile is drawn faint, simulated results are in no memory figure.
"""

from __future__ import annotations

from kvstudy.report.command import command
from kvstudy.report.figures import against_load, budget, memory, quality
from kvstudy.report.figures.registry import FIGURES, Drawn, Kind, draw, figure, write

__all__ = ["FIGURES", "Drawn", "Kind", "against_load", "budget", "draw", "figure", "main", "memory", "quality", "write"]

#: `kvstudy figure`.
main = command("figure", "Draw figures of a study.", FIGURES, write, ".pdf")
