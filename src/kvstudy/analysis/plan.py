"""A study's plan as the analysis reads it: which cells it holds, and what was left out and why."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class AnalysisError(Exception):
    """Something the user can put right; its text is one clear message."""


@dataclass(frozen=True)
class PlannedCell:
    """A cell of the study: its id, the deployment and visit it belongs to, its resolved config."""

    id: str
    deployment: str
    visit: str
    config: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """`plan.json`: the study, its cells in plan order, and the combinations that mean nothing."""

    name: str
    title: str
    question: str
    cells: tuple[PlannedCell, ...]
    left_out: tuple[dict[str, str], ...] = field(default=())
    quality: tuple[PlannedCell, ...] = ()


def read_plan(path: Path) -> Plan:
    """The plan in `path`.

    Raises
    ------
    AnalysisError
        The file is not there or is not a plan.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        study = raw["study"]
        cells, quality = (
            tuple(
                PlannedCell(id=c["id"], deployment=c["deployment"], visit=c.get("visit", ""), config=c["config"])
                for c in raw.get(name, ())
            )
            for name in ("cells", "quality")
        )
        return Plan(
            name=study["name"],
            title=study.get("title") or study["name"],
            question=study.get("question", ""),
            cells=cells,
            left_out=tuple(raw.get("left_out", ())),
            quality=quality,
        )
    except FileNotFoundError:
        raise AnalysisError(f"no plan at {path}; make it with `kvstudy grid study=<name>`") from None
    except (ValueError, KeyError, TypeError) as error:
        raise AnalysisError(f"{path} is not a plan: {error!r}") from error
