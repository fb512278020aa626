"""Figures and table of quality, from a made-up quality table beside a made-up study."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from fabricate import Spec

from kvstudy.grid.records import QUALITY_COLUMNS
from kvstudy.report import document, figures, tables
from kvstudy.report.data import StudyData
from kvstudy.report.figures.quality import _undominated
from kvstudy.report.latex import latex

Study = Callable[[list[Spec]], StudyData]


def rows(row: Any, worse: float) -> list[dict[str, Any]]:
    share = float(row["budget_share"])
    base = {
        "cell": f"q-{row['cell']}",
        "deployment": row["deployment"],
        "framework": row["framework"],
        "implementation": row["implementation"],
        "rule": row["rule"],
        "model": row["model"],
        "weights": "pretrained",
        "budget": share,
        "budget_of": "prompt",
        "quality": "made-up",
        "seed": 0,
        "verdict": "VALID",
        "source": "measured",
        "n": 8,
        "kept_share": share,
        "attended_share": 0.9 * share,
        "kv_bytes": 2**20 * 8 * share,
        "kv_device_bytes": 2**20 * 8 * share,
        "kv_host_bytes": 0.0,
    }
    found = []
    for measure, value in (("perplexity", 8 + worse), ("kl", worse / 10), ("retention", 0.9 - worse / 10)):
        for context in (256, 1024):
            spread = {"low": value - 0.1, "high": value + 0.1, "diff": worse, "diff_low": worse - 0.1}
            found.append(
                base
                | spread
                | {"measure": measure, "context": context, "depth": math.nan, "value": value}
                | {"diff_high": worse + 0.1}
            )
            if measure == "retention":
                found += [found[-1] | {"depth": depth} for depth in (0.0, 0.5, 1.0)]
                found += [found[-1] | {"depth": math.nan, "measure": "retention_strict"}]
    return found


@pytest.fixture
def scored(study: Study) -> StudyData:
    data = study([Spec("vllm"), Spec("full"), Spec("h2o", budget=0.3), Spec("streaming", budget=0.3)])
    worse = {"vllm": 0.0, "full": 0.0, "h2o": 1.0, "streaming": 4.0}
    made = [made for _, row in data.table.iterrows() for made in rows(row, worse[str(row["framework"])])]
    data.quality = pd.DataFrame(made).reindex(columns=list(QUALITY_COLUMNS)).astype(QUALITY_COLUMNS)
    return data


@pytest.mark.parametrize("name", ["quality_vs_budget", "pareto", "retention_map"])
def test_figures_of_a_scored_study(name: str, scored: StudyData, tmp_path: Path) -> None:
    drawn = figures.write(name, scored, tmp_path)
    assert "No data" not in drawn.caption and "probably seen it" in drawn.caption
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000


def test_a_deployment_may_be_timed_in_another_memory_than_it_is_scored_in(scored: StudyData) -> None:
    scored.quality["deployment"] = scored.quality["deployment"] + "-in-another-memory"
    caption = figures.draw("pareto", scored).caption
    assert "No data" not in caption and "64 MiB of KV memory" in caption


def test_random_weights_and_invalid_cells_have_no_quality(scored: StudyData) -> None:
    scored.quality["weights"] = pd.array(["random"] * len(scored.quality), dtype="string")
    for name in ("quality_vs_budget", "pareto", "retention_map"):
        assert "No data" in figures.draw(name, scored).caption
    assert tables.TABLES["quality"](scored).empty


def test_the_front_is_of_all_three() -> None:
    costs = np.array([[1, 5, 5], [5, 1, 5], [5, 5, 1], [5, 5, 5], [1, 5, 5], [6, 6, 6]], dtype=float)
    assert _undominated(costs) == [True, True, True, False, True, False]


def test_the_table_says_what_differs_from_the_full_cache(scored: StudyData) -> None:
    made = tables.TABLES["quality"](scored)
    assert [row[0] for row in made.rows[:4]] == ["vLLM", "full (ours)", "H2O b=0.3", "StreamingLLM b=0.3"]
    assert made.rows[2][4] == "9.00 [0.900, 1.10]" and (2, 4) in made.bold and (1, 4) not in made.bold
    assert "H2O" in latex(made)


def test_variants_of_a_framework_are_lines_of_their_own(scored: StudyData) -> None:
    own = scored.quality[scored.quality["framework"] == "h2o"]
    other = own.assign(variant="no threshold", deployment="another", cell="another")
    scored.quality = pd.concat([scored.quality, other], ignore_index=True).astype(QUALITY_COLUMNS)
    labels = [text.get_text() for text in figures.draw("quality_vs_budget", scored).figure.legends[0].get_texts()]
    assert labels == ["vLLM", "full (ours)", "H2O", "H2O no threshold", "StreamingLLM"]
    made = tables.TABLES["quality"](scored)
    assert [row[0] for row in made.rows[2:4]] == ["H2O b=0.3", "H2O no threshold b=0.3"]


def test_the_document_has_a_section_only_where_something_was_scored(scored: StudyData, tmp_path: Path) -> None:
    plan = document.read_plan(scored.results / "plan" / "s" / "plan.json")
    with_it = document.payload(scored, plan, tmp_path / "f")
    assert "Quality" in [section["title"] for section in with_it["sections"]]
    scored.quality = scored.quality.iloc[:0]
    without = document.payload(scored, plan, tmp_path / "f")
    assert "Quality" not in [section["title"] for section in without["sections"]]
    assert without["tables"]["quality"]["empty"]
