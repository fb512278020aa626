"""What figures, tables and the document are made from: a study's table, its points and its cell files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvstudy.analysis.quality import no_quality, read_quality
from kvstudy.analysis.replicates import points
from kvstudy.analysis.table import read_table, usable
from kvstudy.grid.store import Layout
from kvstudy.report import style, words


@dataclass
class StudyData:
    """A study as the report sees it."""

    table: pd.DataFrame
    results: Path
    attribution: pd.DataFrame = field(default_factory=pd.DataFrame)
    claims: list[dict[str, Any]] = field(default_factory=list)
    quality: pd.DataFrame = field(default_factory=no_quality)

    @classmethod
    def load(cls, study_dir: Path, results: Path | None = None) -> StudyData:
        """Read what `kvstudy analyse` wrote into `study_dir`; `results` defaults to its parent."""
        path = study_dir / "attribution.csv"
        attribution = pd.read_csv(path) if path.is_file() else pd.DataFrame()
        for axis in {"token_rate", "burstiness"} - set(attribution):  # which an older version did not write
            attribution[axis] = np.nan
        decided = study_dir / "claims.json"
        claims = json.loads(decided.read_text(encoding="utf-8")) if decided.is_file() else []
        table = read_table(study_dir / "cells.parquet")
        return cls(table, results or study_dir.parent, attribution, claims, read_quality(study_dir))

    @cached_property
    def points(self) -> pd.DataFrame:
        """Points and metrics with the name of the line they belong to (`series`)."""
        frame = points(self.table)
        return frame if frame.empty else with_series(frame)

    @cached_property
    def cells(self) -> pd.DataFrame:
        """The table with the name of the line that each cell belongs to (`series`)."""
        return with_series(self.table)

    def lines(self, frame: pd.DataFrame) -> list[tuple[str, str, int]]:
        """(label, framework, variant) of the lines in `frame`; a line looks the same in every figure."""
        present = set(frame["series"])
        return [line for line in series_of(self.cells) if line[0] in present]

    def metric(self, name: str) -> pd.DataFrame:
        """The points of one metric that a figure may show: a fork's debugging run has no speeds."""
        every = self.points
        return every if every.empty else every[(every["metric"] == name) & (every["state"] != "debug")]

    def unit(self, metric: str) -> str:
        """The unit a metric is stored in."""
        return str(self.table.attrs.get("units", {}).get(metric, ""))

    def shown(self, metric: str) -> words.Display:
        """How a metric is shown, the same throughout the study."""
        values = self.metric(metric)
        largest = None if values.empty else float(values["value"].max())
        return words.display(metric, self.unit(metric), largest)

    @property
    def study(self) -> dict[str, str]:
        """Name, title and question."""
        return dict(self.table.attrs.get("study", {}))

    @property
    def machines(self) -> dict[str, Any]:
        """Detected hardware by fingerprint."""
        return dict(self.table.attrs.get("machines", {}))

    def machine(self) -> str:
        """The machine in a line."""
        found = [words.machine(hardware) for hardware in self.machines.values()]
        return "; ".join(found) or "machine not recorded"

    def usable(self) -> pd.DataFrame:
        """Cells whose numbers may be shown as results."""
        return self.cells[usable(self.table)]

    def cell_dir(self, cell: str) -> Path:
        """Folder of a cell."""
        return Layout(self.results).cell(cell)


def memory_bytes(frame: pd.DataFrame, kind: str, tier: str) -> pd.Series:
    """The largest recorded bytes of a kind on a tier, a value a row; NaN where none was recorded."""
    names = [f"memory.{kind}_peak.{tier}", f"memory.{kind}.{tier}"]
    found = [name for name in names if name in frame]
    if not found:
        return pd.Series(np.nan, index=frame.index)
    return frame[found].max(axis=1)


def told_apart(frame: pd.DataFrame, columns: Sequence[str] = ("variant", "implementation", "rule")) -> list[str]:
    """Each row's framework, with what of `columns` tells two of a framework's rows apart."""
    said = frame[list(columns)].astype("string").fillna("")
    several = {
        column: {name for name, part in said.groupby(frame["framework"]) if part[column].nunique() > 1}
        for column in columns
    }
    # How a fork is served is always said: its scheduling is not its policy.
    return [
        " ".join(
            [words.framework(str(name))]
            + [str(row[c]) for c in columns if row[c] and (name in several[c] or row[c] == "batch server")]
        )
        for name, row in zip(frame["framework"], said.to_dict("records"), strict=True)
    ]


def with_series(frame: pd.DataFrame) -> pd.DataFrame:
    """Add `series`, the label of a line: the framework and whatever else tells two of its lines apart.

    And `line`, the same without a budget, for panels of one budget each.
    """
    frame = frame.copy()
    # A framework with budgets says of the whole cache, too, which it is.
    budgeted = set(frame.loc[(frame["budget_share"] < 1) | (frame["budget_of"] == "tokens"), "framework"])
    labels = []
    columns = ["framework", "budget_share", "budget_of", "budget_tokens"]
    names = told_apart(frame, ("variant", "implementation", "rule", "scheduler"))
    for name, row in zip(names, frame[columns].to_dict("records"), strict=True):
        parts = [name]
        if row["budget_of"] == "tokens" and pd.notna(row["budget_tokens"]):
            parts.append(f"{words.plain(row['budget_tokens'])} entries")
        elif row["framework"] in budgeted:
            parts.append(f"b={words.plain(row['budget_share'])}")
        labels.append(" ".join(parts))
    frame["line"], frame["series"] = names, labels
    return frame


def series_of(frame: pd.DataFrame) -> list[tuple[str, str, int]]:
    """(label, framework, variant) of the lines of a frame, in the order of a legend."""
    distinct = frame[["series", "framework", "budget_share"]].drop_duplicates("series")
    rows = [(str(s), str(f), float(b)) for s, f, b in distinct.itertuples(index=False)]
    rows.sort(key=lambda row: (style.rank(row[1]), -row[2], row[0]))
    seen: dict[str, int] = {}
    out = []
    for label, framework, _ in rows:
        out.append((label, framework, seen.get(framework, 0)))
        seen[framework] = seen.get(framework, 0) + 1
    return out


def markers_of(frame: pd.DataFrame) -> dict[str, str]:
    """The marker of each `series` and `line` of a frame: of a framework's, those that differ in more than budgets."""
    line_of = dict(zip(frame["series"], frame["line"], strict=True))
    seen: dict[str, list[str]] = {}
    found: dict[str, str] = {}
    for label, framework, _ in series_of(frame):
        lines, line = seen.setdefault(framework, []), str(line_of[label])
        if line not in lines:
            lines.append(line)
        found[label] = found[line] = style.marker(framework, lines.index(line))
    return found
