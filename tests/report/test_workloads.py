"""What a report shows of studies that sweep the workload: mixes, shared prefixes, bursts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fabricate import Spec

from kvstudy.analysis.plan import read_plan
from kvstudy.report import document, figures, findings, tables, words
from kvstudy.report.data import StudyData
from kvstudy.report.latex import latex

Study = Callable[[list[Spec]], StudyData]


@pytest.fixture
def mix(study: Study) -> StudyData:
    return study([Spec(name, 1.0, long_share=share) for name in ("vllm", "full") for share in (0.0, 0.4, 1.0)])


def test_short_and_long_requests_have_panels_of_their_own(mix: StudyData) -> None:
    drawn = figures.draw("ttft_vs_rate", mix)
    at = {axes.get_title(): {float(x) for line in axes.lines for x in line.get_xdata()} for axes in drawn.figure.axes}
    # Where all requests are short, the short ones are all.
    assert at == {"all requests": {0.0, 0.4, 1.0}, "short requests": {0.0, 0.4}, "long requests": {0.4, 1.0}}
    assert "shown apart" in drawn.caption
    assert [axes.get_title() for axes in figures.draw("throughput_vs_rate", mix).figure.axes] == [""]


def test_a_sentence_says_which_mix_it_speaks_of(mix: StudyData) -> None:
    said = [item.text.replace("\N{NO-BREAK SPACE}", " ") for item in findings.headlines(mix)]
    begun = [text.partition(": ")[0] for text in said if "output throughput" in text]
    assert sorted(begun) == [f"chat-small, {share} % long" for share in (0, 100, 40)]
    # At a single load there is no highest one.
    assert not [text for text in said if "load compared" in text or "with enough samples" in text]


def test_the_table_of_classes_has_the_cells_own_numbers(mix: StudyData) -> None:
    made = tables.TABLES["classes"](mix)
    assert [(row[0], row[2]) for row in made.rows] == [
        ("vLLM", "short"),
        ("vLLM", "long"),
        ("full (ours)", "short"),
        ("full (ours)", "long"),
    ]
    cell = mix.table[(mix.table["framework"] == "vllm") & (mix.table["long_share"] == 0.4)].iloc[0]
    short, long = made.frame.iloc[0], made.frame.iloc[1]
    assert short["ttft.p50.value"] == cell["ttft.short.p50"] and long["ttft.p50.value"] == cell["ttft.long.p50"]
    assert int(short["ttft.p50.n"] + long["ttft.p50.n"]) == cell["ttft.p50.n"] and made.cells[0] == [cell["cell"]]
    assert "short" in latex(made)


def test_the_table_of_prefixes_says_what_was_cached(study: Study) -> None:
    specs = [Spec("vllm", shared=share, prefix_caching=on) for share in (0.0, 0.5) for on in (False, True)]
    data = study([*specs, Spec("full", shared=0.5), Spec("full", 3.0)])
    made = tables.TABLES["prefixes"](data)
    # The higher rate shares nothing and is compared with nothing that does.
    assert {row[1] for row in made.rows} == {"1 req/s"} and len(made.rows) == 5
    assert [row[2:4] for row in made.rows if row[0] == "vLLM prefix caching"] == [["–", "–"], ["50.0", "45.0"]]
    assert all(row[2:4] == ["–", "–"] for row in made.rows if row[0] != "vLLM prefix caching")
    assert made.frame["prefix_hits"].max() == pytest.approx(0.45)


def test_bursts_of_one_rate_are_told_apart(study: Study) -> None:
    loads = [{}, {"burstiness": 2.0}, {"burstiness": 4.0}, {"rate": None, "at_once": 24}]
    data = study([Spec(name, **load) for name in ("vllm", "full") for load in loads])
    told = {"1 req/s", "1 req/s of burstiness 2", "1 req/s of burstiness 4", "24 req at once"}
    for name, column in (("summary", 1), ("attribution", 2), ("guide", 0)):
        found = [row[column].removesuffix(" †") for row in tables.TABLES[name](data).rows]
        assert set(found) == told, name
        assert len(found) == len(told) * (2 if name == "summary" else 1), name
    assert data.attribution.groupby("metric").size().eq(4).all()
    said = " ".join(item.text for item in findings.headlines(data))
    assert "24 requests at once" in said
    assert "At 1 request/s of burstiness 4, the burstiest load compared, output" in said
    assert "At 1 request/s, the least bursty load with enough samples, the median" in said
    panels = {axes.get_title(): axes for axes in figures.draw("ttft_vs_rate", data).figure.axes}
    assert {float(x) for line in panels["1 request/s"].lines for x in line.get_xdata()} == {1.0, 2.0, 4.0}


def test_the_document_prints_what_there_is(mix: StudyData, tmp_path: Path) -> None:
    content = document.payload(mix, read_plan(mix.results / "plan/s/plan.json"), tmp_path)
    assert content["tables"]["classes"]["rows"] and content["tables"]["prefixes"]["empty"]
    assert (
        document.main(
            [
                "--plan",
                str(mix.results / "plan/s/plan.json"),
                "--results",
                str(mix.results),
                "--out",
                str(tmp_path / "a.pdf"),
                "--study-dir",
                str(mix.results / "s"),
                "--figures",
                str(tmp_path),
            ]
        )
        == 0
    )


def test_a_load_set_by_its_tokens_is_named_by_them() -> None:
    row = {"load": "poisson", "rate": 0.416667, "concurrency": None, "token_rate": 160.0, "burstiness": None}
    assert words.load(row) == "160 tokens/s offered"
    assert words.load(row | {"token_rate": None, "rate": 1.0}) == "1 request/s"
