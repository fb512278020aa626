"""Plan + store -> `quality.parquet`, a row a quality cell, measure, context and depth (`records.QUALITY_COLUMNS`).

A cell's own measures, computed where it was scored, with the axes of its deployment; `deployment` joins them with the
cells table. Cells that were not scored have no row. A study that asks for no quality has an empty table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from kvstudy.analysis.plan import Plan
from kvstudy.analysis.table import deployment_axes, read_cell, read_measured
from kvstudy.grid.records import QUALITY_COLUMNS
from kvstudy.grid.store import MEASURES, Layout

#: Beside cells.parquet.
QUALITY = "quality.parquet"


def build_quality(plan: Plan, results: Path) -> pd.DataFrame:
    """The quality table of a study, in plan order. Raises `AnalysisError` for a summary that is none."""
    layout = Layout(results)
    frames = []
    for cell in plan.quality:
        found = read_cell(layout.cell(cell.id))
        path = layout.cell(cell.id) / MEASURES
        if found is None or not path.is_file():
            continue
        summary, _ = found
        measures = read_measured(path)
        if measures.empty:  # nothing of it could be scored; its summary says why
            continue
        axes = _axes(cell.config) | {
            "cell": cell.id,
            "deployment": cell.deployment,
            "verdict": summary.verdict.status,
            "source": summary.source,
        }
        frames.append(measures.assign(**axes))
    table = pd.concat(frames, ignore_index=True) if frames else no_quality()
    return table.reindex(columns=list(QUALITY_COLUMNS)).astype(QUALITY_COLUMNS)


def _axes(config: dict[str, Any]) -> dict[str, Any]:
    axes = deployment_axes(config)
    budget = axes["budget_share"] if axes["budget_tokens"] is None else None
    return axes | {"budget": budget, "quality": config["quality"]["name"]}


def no_quality() -> pd.DataFrame:
    """The table of a study that asks for none."""
    return pd.DataFrame(columns=list(QUALITY_COLUMNS)).astype(QUALITY_COLUMNS)


def read_quality(study_dir: Path) -> pd.DataFrame:
    """The quality table beside a study's cells.parquet; empty, with its columns, where there is none."""
    path = study_dir / QUALITY
    return pd.read_parquet(path) if path.is_file() else no_quality()
