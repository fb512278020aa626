"""Figures: every one of them for every study, honest marks, captions from data, the same bytes twice."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from fabricate import Spec

from kvstudy.report import families, figures, findings, style
from kvstudy.report.data import StudyData

Study = Callable[[list[Spec]], StudyData]


def test_every_figure_of_a_mixed_study(tmp_path: Path, mixed: StudyData) -> None:
    for name in figures.FIGURES:
        drawn = figures.write(name, mixed, tmp_path / "out")
        assert (tmp_path / "out" / f"{name}.png").stat().st_size > 5_000, name
        assert "No mixed" not in drawn.caption, name


def test_every_figure_of_a_study_with_nothing_in_it(tmp_path: Path, study: Study) -> None:
    data = study([Spec(absent=True), Spec("vllm", 2.0, absent=True)])
    for name in figures.FIGURES:
        assert "No data for this figure: " in figures.write(name, data, tmp_path / "out").caption, name


@pytest.mark.parametrize("specs", [[Spec(outcome="oom")], [Spec(rate=None, concurrency=4)], [Spec(rate=0.1)]])
def test_every_figure_of_a_study_of_one_cell(specs: list[Spec], study: Study) -> None:
    data = study(specs)
    for name in figures.FIGURES:
        figures.draw(name, data)


def test_caption_states_what_a_reader_must_know(mixed: StudyData) -> None:
    caption = figures.draw("ttft_vs_rate", mixed).caption
    for words in ("stand-in", "Poisson", "seed 0", "n = ", "Made-Up CPU 9000", "95 %", "64 MiB", "smollm2"):
        assert words in caption, words
    assert "failed (out of memory)" in caption and "INVALID" in caption and "client_bound" in caption


def test_failed_and_gated_points_are_marked_not_joined(mixed: StudyData) -> None:
    drawn = figures.draw("throughput_vs_rate", mixed)
    axes = drawn.figure.axes[0]
    colours = {name: style.look(name).colour for name in ("h2o", "infinigen")}
    marks = {(line.get_color(), str(line.get_marker())) for line in axes.lines if len(line.get_xdata()) == 1}
    assert (colours["h2o"], style.FAILED_MARKER) in marks
    assert (colours["infinigen"], style.GATED_MARKER) in marks
    joined = [line for line in axes.lines if line.get_color() == colours["h2o"] and line.get_linestyle() != "None"]
    assert all(len(line.get_xdata()) <= 1 for line in joined)


def test_few_samples_are_faint_and_not_joined(study: Study) -> None:
    data = study([Spec(rate=0.2), Spec(rate=2.0)])
    drawn = figures.draw("ttft_vs_rate", data)
    assert "too few samples" in drawn.caption
    lines = [line for line in drawn.figure.axes[0].lines if line.get_linestyle() == "-"]
    assert [len(line.get_xdata()) for line in lines] == [1]


def test_simulated_results_are_in_no_memory_figure(study: Study) -> None:
    specs = [Spec("full"), Spec("h2o", budget=0.3, rule="masked", source="simulated")]
    data = study(specs)
    drawn = figures.draw("kv_memory", data)
    shown = [label.get_text() for label in drawn.figure.axes[0].get_yticklabels()]
    assert shown == ["full (ours)"] and "simulated" in drawn.caption
    timeline = figures.draw("memory_timeline", data)
    assert "H2O" not in {text.get_text() for text in timeline.figure.legends[0].get_texts()}


def test_random_weights_are_said(study: Study) -> None:
    data = study([Spec(model="random-llama-360m"), Spec()])
    assert "random weights" in figures.draw("tpot_vs_rate", data).caption


def test_a_framework_looks_the_same_everywhere_and_no_two_alike() -> None:
    looks = {name: style.look(name) for name in style.ORDER}
    assert len({look.colour for look in looks.values()}) == len({look.marker for look in looks.values()}) == len(looks)
    assert style.look("never-heard-of") == style.look("never-heard-of")


def test_files_are_reproducible_and_embed_their_fonts(tmp_path: Path, mixed: StudyData) -> None:
    for folder in ("a", "b"):
        figures.write("ttft_vs_rate", mixed, tmp_path / folder)
    for suffix in ("pdf", "png", "caption.txt"):
        one, two = (tmp_path / folder / f"ttft_vs_rate.{suffix}" for folder in ("a", "b"))
        assert one.read_bytes() == two.read_bytes(), suffix
    raw = (tmp_path / "a" / "ttft_vs_rate.pdf").read_bytes()
    assert b"/CreationDate" not in raw and b"/FontFile2" in raw and b"/Type3" not in raw


def test_labels_stay_inside_the_page(study: Study) -> None:
    crowd = [Spec("vllm", 1.0), Spec("streaming", 1.0, budget=0.2), Spec("streaming", 2.0, budget=0.5)]
    crowd += [Spec("h2o", 1.0, budget=0.3), Spec("infinigen", 2.0, budget=0.3, outcome="oom")]
    data = study(crowd)
    for name in figures.FIGURES:
        drawing = figures.draw(name, data).figure
        drawing.canvas.draw()
        width, height = drawing.get_size_inches() * drawing.dpi
        box = drawing.get_tightbbox()
        assert box.x0 >= -0.02 and box.y0 >= -0.02, name
        assert box.x1 * drawing.dpi <= width + 2 and box.y1 * drawing.dpi <= height + 2, name


def test_many_budgets_have_panels_and_share_a_legend(study: Study) -> None:
    budgets = (0.5, 0.3, 0.2, 0.1)
    data = study([Spec("full"), *(Spec("h2o", budget=share) for share in budgets)])
    drawing = figures.draw("ttft_vs_rate", data).figure
    assert [axes.get_title() for axes in drawing.axes] == [f"b = {share}" for share in sorted(budgets)]
    assert [text.get_text() for text in drawing.legends[0].get_texts()] == ["full (ours)", "H2O"]
    assert all(len([line for line in axes.lines if len(line.get_xdata())]) >= 2 for axes in drawing.axes)


def test_an_axis_is_named_after_what_varies_whatever_the_load(study: Study) -> None:
    sizes = (32.0, 64.0)
    data = study([Spec(name, None, at_once=12, kv_memory_mib=mib) for name in ("vllm", "full") for mib in sizes])
    (axes,) = figures.draw("ttft_vs_rate", data).figure.axes
    assert axes.get_xlabel() == "KV memory (MiB)"
    (axes,) = figures.draw("ttft_vs_rate", study([Spec("full", None, at_once=12)])).figure.axes
    assert axes.get_xlabel() == "requests at once"


def test_the_memory_sentence_is_short(study: Study) -> None:
    budgets = (0.5, 0.3, 0.2, 0.1)
    data = study([Spec("full"), *(Spec(name, budget=share) for name in ("h2o", "streaming") for share in budgets)])
    (said,) = [item for item in findings.headlines(data) if item.text.startswith("The most KV")]
    assert "MiB reserved, at each framework's smallest budget, was, in MiB, full (ours): " in said.text
    assert said.text.count("b=0.1: ") == 2 and "b=0.5" not in said.text and len(said.cells) == 3


def test_unknown_figure_names_the_choices(tmp_path: Path, capsys: pytest.CaptureFixture[str], study: Study) -> None:
    study([Spec()])
    capsys.readouterr()
    assert figures.main(["nonsense", "--study-dir", str(tmp_path / "s")]) == 2
    assert "ttft_vs_rate" in capsys.readouterr().err


def test_names_of_figures_need_no_matplotlib() -> None:
    code = "import sys, kvstudy.report as r; assert r.FIGURES and 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_unit_is_missing(mixed: StudyData) -> None:
    for name in figures.FIGURES:
        for axes in figures.draw(name, mixed).figure.axes:
            for label in (axes.get_xlabel(), axes.get_ylabel()):
                plain = label in ("", "MiB", "share of KV attended") or re.search(r"\(.+\)$", label)
                assert plain, (name, label)


def test_panels_run_along_the_load_and_then_along_what_else_varies() -> None:
    def point(**own: object) -> dict[str, object]:
        base = {"model": "m", "workload": "w", "prompt_tokens": 128.0, "output_tokens": 16.0, "long_share": 0.0}
        base |= {"shared_share": 0.0, "turns": None, "load": "poisson", "rate": 1.0, "token_rate": None}
        base |= {"concurrency": None, "burstiness": None, "kv_memory_mib": 16.0, "hardware": "cpu"}
        row = base | own
        return row | {"workload_key": str([row[name] for name in ("prompt_tokens", "long_share", "shared_share")])}

    closed = {"load": "closed", "rate": None, "concurrency": 2.0}
    frame = pd.DataFrame(
        [
            point(),
            point(rate=3.0),
            point(long_share=0.5),  # beside the first point, which begins two lines
            point(**closed),
            point(**closed, prompt_tokens=512.0),
            point(load="gamma", burstiness=4.0),
            point(load="burst", rate=None),
            point(model="other"),
        ]
    ).astype({name: float for name in ("turns", "rate", "token_rate", "concurrency", "burstiness")})
    found = [(axis, sorted(part.index)) for axis, part in families.families(frame)]
    assert found == [
        ("rate", [0, 1]),
        ("long_share", [0, 2]),
        ("burstiness", [0, 5]),
        ("prompt_tokens", [3, 4]),
        (None, [6]),
        ("rate", [7]),
    ]


def test_a_mix_at_equal_tokens_a_second_runs_along_the_share_though_its_rates_differ() -> None:
    rows = [{"long_share": share, "rate": rate, "token_rate": 300.0} for share, rate in ((0.0, 2.5), (1.0, 0.5))]
    same = {"model": "m", "workload": "w", "prompt_tokens": 96.0, "output_tokens": 24.0, "shared_share": 0.0}
    same |= {"turns": float("nan"), "load": "poisson", "concurrency": float("nan"), "burstiness": float("nan")}
    same |= {"kv_memory_mib": 16.0, "hardware": "cpu"}
    frame = pd.DataFrame([row | same | {"workload_key": str(row["long_share"])} for row in rows])
    ((axis, part),) = families.families(frame)
    assert (axis, len(part)) == ("long_share", 2)
