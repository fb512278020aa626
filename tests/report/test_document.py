"""Tables and the document: numbers come from the data, text fits, the same bytes twice, offline."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from fabricate import Spec

from kvstudy.analysis.plan import read_plan
from kvstudy.analysis.replicates import points
from kvstudy.report import FIGURES, document, findings, tables, words
from kvstudy.report.data import StudyData
from kvstudy.report.latex import latex
from kvstudy.report.tables import measured

TEMPLATE = document.TEMPLATE
Study = Callable[[list[Spec]], StudyData]


def test_summary_table_is_the_points(tmp_path: Path, mixed: StudyData) -> None:
    made = tables.write("summary", mixed, tmp_path / "tables")
    frame = pd.read_csv(tmp_path / "tables" / "summary.csv")
    expected = points(mixed.table)
    expected = expected[expected["metric"] == "throughput.output"].set_index("point")["value"]
    for _, row in frame.iterrows():
        value = expected[row["point"]]
        assert row["throughput.output.value"] == pytest.approx(value, nan_ok=True)
    assert {row[-1] for row in made.rows} >= {"VALID", "out of memory", "INVALID: client_bound"}


def test_starred_medians_are_marked(study: Study) -> None:
    made = tables.TABLES["summary"](study([Spec(rate=0.2)]))
    assert any(cell.endswith("*") for cell in made.rows[0])


def test_latex_is_booktabs_with_escaped_text(mixed: StudyData) -> None:
    for name in tables.TABLES:
        made = tables.TABLES[name](mixed)
        text = latex(made)
        # Nothing of the kind was measured in this study: the table says so, and tests of its own have rows.
        assert bool(made.empty) == (name in ("quality", "classes", "prefixes", "admission"))
        if made.empty:
            assert text.startswith("% ")
            continue
        rows = re.findall(r"^(.*) \\\\$", text, re.M)
        columns = {len(re.findall(r"(?<!\\)&", row)) for row in rows}
        assert len(columns) == 1, name
        assert r"\toprule" in text and r"\bottomrule" in text
        body = text.split(r"\midrule")[1]
        assert not re.search(r"(?<!\\)[_%#]", body)
    assert "S[table-format=" in latex(tables.TABLES["summary"](mixed))


def test_tables_of_nothing_say_so(tmp_path: Path, study: Study) -> None:
    data = study([Spec(absent=True)])
    for name in tables.TABLES:
        assert tables.TABLES[name](data).empty or name == "claims"  # those are all not testable
        tables.write(name, data, tmp_path / "tables")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.12345, "0.123"),
        (99.96, "100"),
        (1234567.0, "1 230 000"),
        (0.0, "0"),
        (None, "–"),
        (float("inf"), "∞"),
    ],
)
def test_significant_digits(value: float | None, text: str) -> None:
    assert words.number(value).replace("\N{NARROW NO-BREAK SPACE}", " ") == text


def test_headline_claims_an_order_only_where_intervals_are_apart(study: Study) -> None:
    data = study([Spec("vllm", 2.0), Spec("full", 2.0)])
    table = data.table
    table.loc[:, "throughput.output"] = [100.0, 50.0]
    table.loc[:, "throughput.output.low"] = [90.0, 45.0]
    table.loc[:, "throughput.output.high"] = [110.0, 55.0]
    apart = findings.headlines(StudyData(table, data.results))[0].text
    assert "vLLM led" in apart and "2.00 times" in apart
    table.loc[:, "throughput.output.high"] = [110.0, 95.0]
    near = findings.headlines(StudyData(table, data.results))[0].text
    assert "no order" in near and "led" not in near


def test_starred_percentiles_are_not_in_headlines(study: Study) -> None:
    data = study([Spec("vllm", 0.2), Spec("full", 0.2)])
    text = " ".join(item.text for item in findings.headlines(data))
    assert "median time" not in text


def test_sentences_carry_their_cells(mixed: StudyData) -> None:
    known = set(mixed.table["cell"])
    for item in [*findings.headlines(mixed), *findings.failures(mixed)]:
        assert item.cells and set(item.cells) <= known, item.text


def make(data: StudyData) -> Path:
    """Make the PDF of a study with figures of its own (the shared study's are made once)."""
    root = data.results
    out = root / "s" / "report.pdf"
    plan = root / "plan" / "s" / "plan.json"
    arguments = ["--plan", str(plan), "--results", str(root), "--template", str(TEMPLATE), "--out", str(out)]
    assert document.main(arguments) == 0
    return out


def test_document_is_made_twice_the_same(mixed: StudyData) -> None:
    first = make(mixed).read_bytes()
    assert first.startswith(b"%PDF") and make(mixed).read_bytes() == first


def test_document_of_an_unmeasured_study(study: Study) -> None:
    make(study([Spec(absent=True)]))


def test_document_says_what_the_data_say(mixed: StudyData) -> None:
    if shutil.which("pdftotext") is None:
        pytest.skip("pdftotext (poppler-utils) is not installed")
    command = ["pdftotext", "-layout", str(make(mixed)), "-"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for cell in mixed.table["cell"]:
        assert cell[:40] in text.replace("\n", ""), cell
    for word in ("Made-Up CPU 9000", "client_bound", "out of memory", "0.32.0", "stand-in"):
        assert word in text, word
    row = mixed.metric("throughput.output").set_index("series")["value"]
    assert words.number(float(row["vLLM"].iloc[0])) in text


def test_template_holds_no_result() -> None:
    """Numbers are handed in: outside of layout the template has none."""
    text = TEMPLATE.read_text()
    text = re.sub(r"//.*", "", text)
    text = re.sub(r"-?\d+(\.\d+)?(pt|mm|em|fr|%)", "", text)
    prose = " ".join(re.findall(r"^[A-Z][^#{}()]*$", text, re.M))
    assert not re.findall(r"\d", prose.replace("HTTP/1.1", ""))


def test_broken_template_is_one_clear_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mixed: StudyData
) -> None:
    broken = tmp_path / "broken.typ"
    broken.write_text("#let x = ")
    arguments = ["--plan", str(mixed.results / "plan" / "s" / "plan.json"), "--results", str(mixed.results)]
    arguments += ["--study-dir", str(mixed.results / "s"), "--template", str(broken)]
    assert document.main([*arguments, "--out", str(tmp_path / "r.pdf")]) == 2
    assert "does not compile" in capsys.readouterr().err
    assert not (tmp_path / "r.pdf").exists()


def test_payload_numbers_cells_as_the_appendix_does(mixed: StudyData) -> None:
    content = document.payload(mixed, read_plan(mixed.results / "plan/s/plan.json"), mixed.results / "s" / "figures")
    numbers = {str(cell["number"]) for cell in content["cells"]}
    cited = set(re.findall(r"\d+", " ".join(item["cells"] for item in content["headlines"])))
    assert cited and cited <= numbers
    names = [one["name"] for section in content["sections"] for one in section["figures"]]
    assert sorted(names) == sorted(name for name, category in FIGURES.items() if category != "Quality")
    assert document._ranges([3, 1, 2, 7, 8]) == "1–3, 7, 8"


def test_rows_of_tables_carry_the_numbers_of_their_cells(mixed: StudyData) -> None:
    content = document.payload(mixed, read_plan(mixed.results / "plan/s/plan.json"), mixed.results / "s" / "figures")
    ids = {cell["id"]: str(cell["number"]) for cell in content["cells"]}
    for name in ("summary", "attribution", "claims", "guide"):
        shown = content["tables"][name]
        assert shown["columns"][-1]["label"] == "Cells" and shown["rows"], name
    frame = tables.TABLES["summary"](mixed).frame
    for row, cells in zip(content["tables"]["summary"]["rows"], frame["cells"], strict=True):
        assert row[-1] == document._ranges(int(ids[cell]) for cell in str(cells).split())


def test_what_was_left_out_is_grouped_by_its_reason() -> None:
    items = [{"cell": f"c{i}", "reason": "too long"} for i in range(5)] + [{"cell": "x", "reason": "no device"}]
    assert document._left_out(items) == [
        {"cell": "c0, c1, c2 and 2 more", "reason": "too long"},
        {"cell": "x", "reason": "no device"},
    ]


def test_a_comparison_tells_every_latency_of_it(mixed: StudyData) -> None:
    """Time per output token alone would hide what a policy gains in waiting."""
    text = " ".join(item.text for item in findings.headlines(mixed))
    policy = text[text.index("The policy, by paired requests") :]
    for name in ("E2EL ×", "TTFT ×", "TPOT ×"):
        assert name in policy, name


def test_a_policy_that_is_off_says_so_beside_its_budgets(study: Study) -> None:
    data = study([Spec("h2o", budget=1.0), Spec("h2o", budget=0.3), Spec("full")])
    assert {label for label, _, _ in data.lines(data.cells)} == {"H2O b=1", "H2O b=0.3", "full (ours)"}


def test_columns_of_text_fit_the_line(study: Study) -> None:
    data = study([Spec(name, 1.0) for name in ("vllm", "full")] + [Spec("h2o", 1.0, budget=0.3)])
    for name in tables.TABLES:
        shares = [float(share) for share in re.findall(r"p\{([\d.]+)\\linewidth\}", latex(tables.TABLES[name](data)))]
        assert sum(shares) < 1, name


def test_the_guide_counts_equal_budgets(study: Study) -> None:
    budgets = (0.5, 0.3, 0.2)
    data = study([Spec("full"), *(Spec("h2o", budget=share) for share in budgets), Spec("streaming", budget=0.5)])
    names = ["H2O b=0.3", "full (ours)", "H2O b=0.5", "StreamingLLM b=0.5", "H2O b=0.2"]
    said = measured.in_brief(data.cells, names)
    assert said == ["H2O b=0.3 and 2 other budgets", "full (ours)", "StreamingLLM b=0.5"]
    assert measured.in_brief(data.cells, names[:3]) == ["H2O b=0.3, H2O b=0.5", "full (ours)"]


def test_the_guide_counts_the_host_s_memory_too(study: Study) -> None:
    data = study([Spec("h2o", 1.0, budget=0.3), Spec("infinigen", 1.0, budget=0.3)])
    made = tables.TABLES["guide"](data)
    device, both = (made.frame[name].iloc[0] for name in ("kv_live", "kv_total"))
    assert "InfiniGen" in device and both == "H2O b=0.3"


def test_csv_is_readable_by_others(tmp_path: Path, mixed: StudyData) -> None:
    tables.write("attribution", mixed, tmp_path)
    with (tmp_path / "attribution.csv").open() as handle:
        rows = list(csv.DictReader(handle))
    assert {row["part"] for row in rows} == {"engine", "policy", "total"}
    assert all(float(row["ratio"]) > 0 for row in rows)


def test_a_forks_debugging_run_is_in_the_table_and_in_no_figure(study: Study) -> None:
    data = study([Spec(), Spec("h2o", source="debug")])
    assert list(data.metric("throughput.output")["framework"]) == ["full"]
    assert [row[-1] for row in tables.TABLES["summary"](data).rows if "no speeds" in row[-2] + row[-1]]
