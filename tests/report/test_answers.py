"""The opening sentences: they answer by what the study varies, order by intervals, and say when nothing is clear."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from fabricate import Spec

from kvstudy.analysis.plan import read_plan
from kvstudy.report import answers, document, findings
from kvstudy.report.data import StudyData, markers_of

Study = Callable[[list[Spec]], StudyData]


def texts(data: StudyData) -> list[str]:
    known = set(data.table["cell"])
    found = answers.answers(data)
    assert all(one.cells and set(one.cells) <= known for one in found)
    return [one.text.replace("\N{NO-BREAK SPACE}", " ") for one in found]


def planted(data: StudyData, metric: str, **values: tuple[float, float, float]) -> StudyData:
    """The study with (value, low, high) of a metric at the cells of each line and axis value, `vllm_0` or `h2o_4`."""
    for name, ends in values.items():
        framework, _, place = name.partition("_")
        rows = data.table.index[data.table["framework"] == framework]
        for part, value in zip(("", ".low", ".high"), ends, strict=True):
            data.table.loc[rows[int(place)], f"{metric}{part}"] = value
    return StudyData(data.table, data.results, data.attribution, data.claims, data.quality)


def test_a_study_is_about_what_most_points_vary(study: Study) -> None:
    assert answers.subject(study([Spec("full", 1.0), Spec("full", 3.0)]))[0] == "rate"


def test_short_requests_are_held_up_where_intervals_say_so(study: Study) -> None:
    budgets = {"vllm": 1.0, "full": 1.0, "h2o": 0.3}
    specs = [Spec(name, 3.0, long_share=share, budget=b) for name, b in budgets.items() for share in (0.0, 0.5)]
    data = study(specs)
    data = planted(data, "ttft.p50", vllm_0=(0.2, 0.18, 0.22), full_0=(0.2, 0.18, 0.22), h2o_0=(0.3, 0.28, 0.32))
    later = {"vllm_1": (0.8, 0.4, 2.0), "full_1": (0.3, 0.15, 0.9), "h2o_1": (0.1, 0.05, 0.2)}
    data = planted(data, "ttft.short.p50", **later)
    said = texts(data)
    assert len(said) == 2, said
    first, second = said
    assert "from no long requests to 50 %" in first
    assert "grew under vLLM (from 0.200 [0.180, 0.220] to 0.800 [0.400, 2.00] s)" in first
    assert "fell under H2O b=0.3" in first and "inconclusive under full (ours)" in first
    assert second.startswith("With 50 % long, the same short requests") and "H2O b=0.3 (× " in second
    assert set(data.attribution["metric"]) >= {"ttft.short"}


def test_bursts_compare_the_ends_of_burstiness(study: Study) -> None:
    loads = [{}, {"burstiness": 2.0}, {"burstiness": 4.0}]
    data = study([Spec(name, **load) for name in ("full", "h2o") for load in loads])  # type: ignore[arg-type]
    assert answers.subject(data)[0] == "burstiness"
    said = " ".join(texts(data))
    assert "At 1 request/s, from burstiness 1 to 4, the" in said and "end-to-end latency" in said
    assert "the same requests' time to first token, against the whole cache's," in said


def test_sharing_is_told_by_the_same_requests_with_and_without(study: Study) -> None:
    specs = [Spec("vllm", shared=share, prefix_caching=on) for share in (0.0, 0.5) for on in (False, True)]
    first, second = texts(study([*specs, Spec("full", shared=0.0), Spec("full", shared=0.5)]))
    assert first.startswith("With vLLM prefix caching the time to first token of the same requests was")
    assert "unshared" in first and "with 50 % shared" in first
    assert second.startswith("With 50 % shared the ") and "full (ours)" in second


def test_memory_says_who_stops_where_and_what_is_left(study: Study) -> None:
    how = {"concurrency": 8, "duration_s": 10.0}
    data = study([Spec(name, None, kv_memory_mib=mib, **how) for name in ("vllm", "full") for mib in (96.0, 24.0)])  # type: ignore[arg-type]
    said = texts(data)
    assert said[0].startswith("By KV memory in MiB") and said[-1].startswith("In 24 MiB (8 requests in flight) output")
    content = document.payload(data, read_plan(data.results / "plan/s/plan.json"), data.results / "s" / "figures")
    assert said[0] not in [item["text"] for item in content["headlines"]]  # said once


def test_growth_has_an_exponent_with_an_interval() -> None:
    lengths = np.array([512.0, 1024.0, 2048.0, 4096.0, 8192.0])
    fate, text = answers._growth(lengths, 1e-6 * lengths**1.5 * np.array([1.02, 0.99, 1.0, 0.98, 1.01]))
    assert fate == "grew under" and text.startswith(", as length^1.5")
    assert answers._growth(lengths, np.array([1.0, 1.1, 0.9, 1.1, 1.0]))[0] == ""
    assert answers._growth(lengths[:2], lengths[:2]) == ("went, with no interval, under", "")


def test_the_order_at_a_load_is_that_of_paired_requests(study: Study) -> None:
    data = study([Spec(name, rate) for name in ("vllm", "full", "h2o") for rate in (1.0, 3.0)])
    frame = data.attribution
    e2el = frame["metric"] == "e2el"
    for part, rate, ends in (("engine", 1.0, (0.5, 0.4, 0.6)), ("total", 1.0, (0.55, 0.45, 0.65))):
        frame.loc[e2el & (frame["part"] == part) & (frame["rate"] == rate), ["ratio", "low", "high"]] = ends
    wide = (frame["rate"] == 3.0) & frame["part"].isin(["engine", "total"])
    frame.loc[wide, ["ratio", "low", "high"]] = (0.5, 0.1, 3.0)
    said = texts(data)[0]
    assert "At 1 request/s" in said and "full (ours) is first (× 0.500 [0.400, 0.600] of vLLM's)" in said
    assert "not to be told from H2O; behind: vLLM." in said
    assert "the order is inconclusive" in said[said.index("At 3 requests/s") :]


def test_nothing_measured_has_no_answer(study: Study) -> None:
    assert answers.answers(study([Spec(absent=True)])) == []


def test_a_budget_is_near_only_with_its_whole_interval() -> None:
    told = [("stayed", "A"), ("", "B"), ("", "C")]
    assert (
        answers.sorted_out(told, ("stayed", "left"), "under", "why") == "stayed A; inconclusive under B and C, as why"
    )
    assert answers.sorted_out(told[1:], ("stayed",), "under", "why").startswith("is inconclusive under B")


def test_the_html_report_opens_with_question_and_answer() -> None:
    content = {"study": {"question": "Why *this*?"}, "answers": [{"text": "It is × 2 {so}_."}]}
    said = document.opening(content, "General.")
    assert said == "**Why \\*this\\*?**\n\nIt is × 2 (so)\\_.\n\nGeneral."


def test_lines_that_differ_in_more_than_budgets_have_their_own_marker() -> None:
    rows = [("InfiniGen b=0.5", "InfiniGen", 0.5), ("InfiniGen b=0.2", "InfiniGen", 0.2)]
    rows += [("InfiniGen no threshold b=0.5", "InfiniGen no threshold", 0.5)]
    frame = pd.DataFrame(rows, columns=["series", "line", "budget_share"]).assign(framework="infinigen")
    marks = markers_of(frame)
    assert marks["InfiniGen b=0.5"] == marks["InfiniGen b=0.2"] == marks["InfiniGen"]
    assert marks["InfiniGen no threshold b=0.5"] != marks["InfiniGen"]


def test_no_sentence_only_says_that_samples_are_few(study: Study) -> None:
    data = study([Spec("vllm", 0.2), Spec("full", 0.2)])
    assert not [one for one in findings.headlines(data) if "enough samples" in one.text]


@pytest.mark.parametrize("low", [float("nan"), 0.9])
def test_a_ratio_without_an_interval_prints_none(low: float) -> None:
    row = pd.Series({"metric": "e2el", "ratio": 1.0, "low": low, "high": low + 0.2})
    assert ("[" in findings._compared(row)) == (low == low)
