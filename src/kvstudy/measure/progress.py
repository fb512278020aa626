"""How far a study is, in one phrase: cells done, and how long the rest will take by the pace so far."""

from __future__ import annotations

import json
from pathlib import Path

from kvstudy.grid.store import Layout, is_whole, read_summary

#: Seconds a cell takes for each second of its load, bring-up shared out, until the study's own pace is known.
PACE = 1.6


def of_study(study: str, layout: Layout) -> str:
    """`study quick: 5 of 16 cells done, about 8 min left`; empty where the plan cannot be read."""
    try:
        plan = json.loads(layout.plan(study).read_text(encoding="utf-8"))
        cells = {cell["id"]: float(cell["config"]["load"]["duration_s"]) for cell in plan["cells"]}
        visits = [visit["cells"] for visit in plan["visits"]]
    except (OSError, ValueError, KeyError):
        return ""
    sharing = {cell: len(members) for members in visits for cell in members}
    done = [cell for cell in cells if is_whole(layout.cell(cell))]
    took = [(_seconds(layout.cell(cell), sharing.get(cell, 1)), cells[cell]) for cell in done]
    known = [(seconds, load) for seconds, load in took if seconds is not None]
    pace = sum(seconds for seconds, _ in known) / sum(load for _, load in known) if known else PACE
    left = pace * sum(load for cell, load in cells.items() if cell not in set(done))
    return f"study {study}: {len(done)} of {len(cells)} cells done, about {_span(left)} left"


def _seconds(cell_dir: Path, sharing: int) -> float | None:
    """Wall time that a cell cost: its load and drain, and its part of the bring-up."""
    try:
        visit = read_summary(cell_dir)["visit"]
    except (OSError, ValueError, KeyError):
        return None
    own = (visit.get("load_s") or 0.0) + (visit.get("drain_s") or 0.0)
    shared = (visit.get("bring_up_s") or 0.0) + (visit.get("warm_up_s") or 0.0)
    return float(own + shared / sharing)


def _span(seconds: float) -> str:
    if seconds < 90:
        return f"{max(5, round(seconds / 5) * 5):.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"
