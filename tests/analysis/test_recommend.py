"""The guide: it interpolates with honest intervals and refuses to extrapolate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from planted import cell, metric

from kvstudy.analysis import kept_quality
from kvstudy.analysis import recommend as guide
from kvstudy.analysis.plan import AnalysisError

RATES, CONTEXTS, POOLS = (0.5, 1.0, 2.0, 4.0, 8.0), (100.0, 400.0, 1600.0), (32.0, 64.0)
SPEED = {"vllm": 1.0, "full": 1.3, "h2o": 1.1, "infinigen": 2.0}


def latency(framework: str, rate: float, context: float, pool: float) -> float:
    return SPEED[framework] * (0.5 + 0.002 * context) * (1 + rate / 8) * (1 + 8 / pool)


def table(noise: float = 0.03, seed: int = 0) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    rows = []
    for framework in SPEED:
        for rate in RATES:
            for context in CONTEXTS:
                for pool in POOLS:
                    value = latency(framework, rate, context, pool) * float(np.exp(noise * random.normal()))
                    names = ("e2el.p50", "ttft.p50", "tpot.p50", "throughput.output")
                    values: dict[str, Any] = {}
                    for place, name in enumerate(names):
                        values |= metric(name, value / 10**place, spread=noise)
                    rows.append(cell(framework, rate, prompt_tokens=context, kv_memory_mib=pool, **values))
    return pd.DataFrame(rows)


def test_between_measured_points_the_truth_is_in_the_interval() -> None:
    answers = guide.recommend(table(), guide.Query("m", 250.0, 3.0, 48.0))
    assert [one.framework for one in answers] == ["vllm", "h2o", "full", "infinigen"]
    for answer in answers:
        found = answer.predictions["e2el.p50"]
        truth = latency(answer.framework, 3.0, 250.0, 48.0)
        assert found.low < truth < found.high and found.interpolated
        assert len(found.cells) == 8 and answer.distance > 0


def test_at_a_measured_point_it_is_the_measurement() -> None:
    data = table()
    answer = guide.recommend(data, guide.Query("m", 400.0, 2.0, 64.0))[0]
    row = data[(data["framework"] == "vllm") & (data["rate"] == 2) & (data["prompt_tokens"] == 400)]
    expected = float(row.loc[row["kv_memory_mib"] == 64, "e2el.p50"].iloc[0])
    assert answer.predictions["e2el.p50"].value == pytest.approx(expected)
    assert not answer.predictions["e2el.p50"].interpolated and answer.distance == 0


@pytest.mark.parametrize(
    ("query", "name"),
    [((100.0, 20.0, 64.0), "rate"), ((9999.0, 1.0, 64.0), "context"), ((100.0, 1.0, 8.0), "KV memory")],
)
def test_outside_of_what_was_measured_it_refuses(query: tuple[float, float, float], name: str) -> None:
    context, rate, pool = query
    answers = guide.recommend(table(), guide.Query("m", context, rate, pool))
    assert all(one.refused.startswith(name) and not one.predictions for one in answers)


def test_it_refuses_beyond_a_failure() -> None:
    data = table()
    failed = (data["framework"] == "h2o") & (data["rate"] == 4.0) & (data["kv_memory_mib"] == 64.0)
    data.loc[failed, "outcome"] = "oom"
    answers = {one.framework: one for one in guide.recommend(data, guide.Query("m", 400.0, 6.0, 64.0))}
    assert "failed" in answers["h2o"].refused and not answers["vllm"].refused


def test_bounds_order_the_answers() -> None:
    query = guide.Query("m", 250.0, 3.0, 48.0, slo_e2el=2.4)
    answers = guide.recommend(table(), query)
    assert answers[0].framework == "vllm" and answers[0].slo == "meets"
    assert answers[-1].framework == "infinigen" and answers[-1].slo == "misses"


def test_saturated_neighbours_promise_nothing() -> None:
    data = table()
    data.loc[data["rate"] == 4.0, "saturated"] = True
    answer = guide.recommend(data, guide.Query("m", 250.0, 3.0, 48.0, slo_e2el=100.0))[0]
    assert answer.slo == "may meet" and "saturated" in answer.notes[0]


def test_quality_that_was_not_measured_is_not_promised() -> None:
    answers = guide.recommend(table(), guide.Query("m", 250.0, 3.0, 48.0, min_quality=0.95))
    refused = {one.framework for one in answers if one.refused}
    assert refused == {"h2o", "infinigen"}


def quality_row(
    framework: str, context: float, share: float, measure: str = "retention", **other: Any
) -> dict[str, Any]:
    """A planted quality result that keeps `share` of the whole cache's 0.8."""
    value, whole = 0.8 * share, 0.8
    found = {"framework": framework, "implementation": "native", "rule": "", "variant": "", "model": "m", "budget": 0.3}
    found |= {
        "measure": measure,
        "context": context,
        "depth": float("nan"),
        "verdict": "VALID",
        "weights": "pretrained",
    }
    found |= {
        "value": value,
        "diff": value - whole,
        "diff_low": value - whole - 0.01,
        "diff_high": value - whole + 0.01,
    }
    return found | {"cell": f"q-{framework}-{context:g}"} | other


@pytest.mark.parametrize(("share", "state"), [(1.0, "meets"), (0.5, "misses"), (0.9, "may meet")])
def test_measured_quality_is_held_against_the_bound(share: float, state: str) -> None:
    quality = pd.DataFrame([quality_row(name, at, share) for name in ("h2o", "infinigen") for at in (100.0, 400.0)])
    answers = guide.recommend(table(), guide.Query("m", 250.0, 3.0, 48.0, min_quality=0.9), quality)
    states = {one.framework: one.slo for one in answers}
    assert states == {"vllm": "meets", "full": "meets", "h2o": state, "infinigen": state}
    h2o = next(one for one in answers if one.framework == "h2o")
    assert h2o.quality is not None and h2o.quality.value == pytest.approx(share)


def test_the_worst_measure_of_the_contexts_around_counts() -> None:
    rows = [quality_row("h2o", 100.0, 0.9), quality_row("h2o", 400.0, 0.7), quality_row("h2o", 1600.0, 0.1)]
    worse = {"value": 12.0, "diff": 6.0, "diff_low": 5.0, "diff_high": 7.0}  # perplexity: 6 of the whole cache
    rows.append(quality_row("h2o", 100.0, 1.0, "perplexity", **worse))
    line = pd.Series(
        {"framework": "h2o", "implementation": "native", "rule": "", "variant": "", "model": "m", "budget_share": 0.3},
        dtype=object,
    )
    found = kept_quality.kept(pd.DataFrame(rows), line, 250.0)
    assert found.measure == "perplexity at 100 tokens" and found.value == pytest.approx(0.5)
    assert found.low < 0.5 < found.high
    for context, words in ((50.0, "100 to 1600 tokens"), (2000.0, "not at 2000")):
        with pytest.raises(kept_quality.Unmeasured, match=words):
            kept_quality.kept(pd.DataFrame(rows), line, context)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--rate", "nan", "not a number above 0"),
        ("--rate", "-1", "not a number above 0"),
        ("--context", "0", "not a number above 0"),
        ("--slo-ttft", "inf", "not a number above 0"),
        ("--min-quality", "90", "0.9 for nine tenths"),
    ],
)
def test_a_question_that_means_nothing_is_refused(
    option: str, value: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = {"--cells": "x.parquet", "--model": "m", "--context": "1", "--rate": "1", "--kv-memory": "1"}
    with pytest.raises(SystemExit):
        guide.main([text for pair in (base | {option: value}).items() for text in pair])
    assert words in capsys.readouterr().err


def test_a_table_of_an_older_version_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table().drop(columns="variant").to_parquet(tmp_path / "cells.parquet")
    arguments = ["--cells", str(tmp_path / "cells.parquet"), "--model", "m", "--context", "1", "--rate", "1"]
    assert guide.main([*arguments, "--kv-memory", "1"]) == 2
    assert "run `kvstudy analyse` again" in capsys.readouterr().err


@pytest.mark.parametrize("seed", range(3))
def test_leave_one_out_covers_ninety_percent(seed: int) -> None:
    coverage = {one.metric: one for one in guide.leave_one_out(guide.measured(table(0.05, seed)))}
    assert coverage["e2el.p50"].predicted > 30 and coverage["e2el.p50"].refused > 0
    for one in coverage.values():
        assert not one.predicted or one.share >= 0.9, one


def test_starred_and_gated_points_are_not_used() -> None:
    data = table()
    data.loc[(data["framework"] == "vllm") & (data["rate"] == 8.0), "e2el.p50.starred"] = True
    data.loc[(data["framework"] == "full") & (data["rate"] == 8.0), "verdict"] = "INVALID"
    answers = {one.framework: one for one in guide.recommend(data, guide.Query("m", 100.0, 6.0, 64.0))}
    assert answers["vllm"].refused and answers["full"].refused and not answers["h2o"].refused


def test_unknown_model_names_the_known(tmp_path: Path) -> None:
    with pytest.raises(AnalysisError, match="there are m"):
        guide.recommend(table(), guide.Query("x", 1, 1, 1))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table().to_parquet(tmp_path / "cells.parquet")
    base = ["--cells", str(tmp_path / "cells.parquet"), "--model", "m", "--rate", "3", "--kv-memory", "48"]
    assert guide.main([*base, "--context", "250", "--slo-ttft", "1"]) == 0
    assert "leave-one-out" in capsys.readouterr().out
    assert guide.main([*base, "--context", "250", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["answers"][0]["framework"] == "vllm"
    assert guide.main([*base, "--context", "99999"]) == 1


def test_an_interval_that_is_missing_has_its_reason() -> None:
    frame = table()
    frame[["ttft.p50.low", "ttft.p50.high"]] = np.nan
    query = guide.Query("m", 400.0, 2.0, 64.0)
    answers = guide.recommend(frame, query)
    said = guide._text(answers, query, [])
    assert f"[no interval: {guide.TOO_FEW}]" in said and f"[no interval: {guide.NO_SPREAD}]" in said
    assert "[no interval]" not in said and not answers[0].predictions["e2el.p50"].unknown


def test_a_budget_of_1_is_named_beside_smaller_ones() -> None:
    rows = [cell("h2o", 1.0, budget_share=share) for share in (1.0, 0.3)] + [cell("full", 1.0)]
    labels = set(guide.measured(pd.DataFrame(rows))["label"])
    assert labels == {"h2o native b=1", "h2o native b=0.3", "full native"}
