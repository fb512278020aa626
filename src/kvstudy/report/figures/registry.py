"""What a figure is: a function from a study's data to a drawing and a caption, registered under a name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from kvstudy.analysis.plan import AnalysisError
from kvstudy.grid.store import write_text
from kvstudy.report import FIGURES as CATEGORIES
from kvstudy.report import style
from kvstudy.report.data import StudyData


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


def write(name: str, data: StudyData, out_dir: Path) -> Drawn:
    """Draw a figure and write its files; returns what was drawn."""
    drawn = draw(name, data)
    style.save(drawn.figure, out_dir / name)
    write_text(out_dir / f"{name}.caption.txt", drawn.caption + "\n")
    write_text(out_dir / f"{name}.caption.rst", drawn.caption.replace("*", "\\*") + "\n")
    return drawn
