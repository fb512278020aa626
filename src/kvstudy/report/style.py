"""The look of figures: fit for a two-column paper, the same for every figure and on every machine.

Colours are Okabe and Ito's, which people with any colour vision tell apart; each framework has its own
marker too, so that a figure printed in grey still reads. Fonts are embedded as TrueType (type 42), as
publishers ask, and files carry no date, so that the same numbers give the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import seaborn as sns
from matplotlib.figure import Figure

#: Inches: a column of a two-column paper, and the whole width of its page.
COLUMN = 3.35
PAGE = 7.0

#: Frameworks in the order in which they are listed everywhere.
ORDER = ("vllm", "full", "offload", "h2o", "infinigen", "streaming", "random", "adaptive")

#: Marks of points that are not plain results; the same in every figure and caption.
FAILED_MARKER = "x"
GATED_MARKER = r"$\oslash$"

GREY = "#666666"


@dataclass(frozen=True)
class Look:
    """Colour and marker of a framework."""

    colour: str
    marker: str


_LOOKS = {
    "vllm": Look("#0072B2", "o"),
    "full": Look("#000000", "s"),
    "offload": Look("#56B4E9", "h"),
    "h2o": Look("#D55E00", "^"),
    "infinigen": Look("#009E73", "D"),
    "streaming": Look("#CC79A7", "v"),
    "random": Look("#7F7F7F", "X"),
    "adaptive": Look("#E69F00", "P"),
}
_SPARE = (Look("#9467BD", "*"), Look("#8C564B", "p"), Look("#B5A700", "<"))

#: Markers of a framework's further lines, where its points carry no line that could be dashed.
_VARIANTS = ("p", "*", "<", ">")

#: Dash patterns of the variants of one framework (its budgets, rules, implementations).
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.2, 1.2, 1.2)), (0, (7, 2)))


def look(framework: str) -> Look:
    """The look of a framework; one that is not known yet gets a spare, always the same."""
    if framework in _LOOKS:
        return _LOOKS[framework]
    return _SPARE[sum(framework.encode()) % len(_SPARE)]


def marker(framework: str, variant: int) -> str:
    """The marker of a framework's n-th line in a figure; its first has the framework's own."""
    return look(framework).marker if variant == 0 else _VARIANTS[(variant - 1) % len(_VARIANTS)]


def rank(framework: str) -> tuple[int, str]:
    """Sort key that lists frameworks in their fixed order."""
    return (ORDER.index(framework) if framework in ORDER else len(ORDER), framework)


def use() -> None:
    """Set the style for every figure made from here on."""
    sns.set_theme(
        context="paper",
        style="ticks",
        rc={
            "font.family": "DejaVu Sans",
            "font.size": 7.5,
            "axes.labelsize": 7.5,
            "axes.titlesize": 7.5,
            "axes.titlepad": 4,
            "xtick.labelsize": 7,
            "ytick.labelsize": 7,
            "legend.fontsize": 6.8,
            "legend.frameon": False,
            "legend.handlelength": 2.0,
            "legend.handletextpad": 0.5,
            "legend.columnspacing": 1.0,
            "axes.linewidth": 0.6,
            "axes.edgecolor": "#333333",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.grid.axis": "y",
            "grid.color": "#DDDDDD",
            "grid.linewidth": 0.5,
            "axes.axisbelow": True,
            "xtick.major.width": 0.6,
            "ytick.major.width": 0.6,
            "xtick.major.size": 2.5,
            "ytick.major.size": 2.5,
            "lines.linewidth": 1.2,
            "lines.markersize": 4.5,
            "hatch.linewidth": 0.5,
            "pdf.fonttype": 42,
            "ps.fonttype": 42,
            "svg.hashsalt": "kvstudy",
            "figure.constrained_layout.use": True,
            "savefig.dpi": 200,
        },
    )


def save(figure: Figure, stem: Path) -> None:
    """Write `stem`.pdf and `stem`.png, without a date, and close the figure."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(stem.with_suffix(".pdf"), metadata={"CreationDate": None, "Producer": None, "Creator": None})
    figure.savefig(stem.with_suffix(".png"), metadata={"Software": None})
    plt.close(figure)
