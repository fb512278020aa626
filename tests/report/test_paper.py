"""The LaTeX route: the same figures and tables, compiled for real where there is a LaTeX."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvstudy.report import FIGURES, figures, paper, tables
from kvstudy.report.data import StudyData

needs_latex = pytest.mark.skipif(
    shutil.which("latexmk") is None
    or subprocess.run(["kpsewhich", "siunitx.sty"], capture_output=True).returncode != 0,
    reason="needs latexmk and a LaTeX with siunitx",
)


@pytest.fixture(scope="module")
def drawn(mixed: StudyData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study's folder with its figures and tables."""
    folder = mixed.results / "s"
    for name in FIGURES:
        figures.write(name, mixed, folder / "figures")
    for name in tables.TABLES:
        tables.write(name, mixed, folder / "tables")
    return folder


@needs_latex
def test_the_paper_compiles_with_every_figure_and_table(drawn: Path, tmp_path: Path) -> None:
    out = tmp_path / "paper.pdf"
    assert paper.main(["--study-dir", str(drawn), "--out", str(out)]) == 0
    raw = out.read_bytes()
    assert raw.startswith(b"%PDF") and len(raw) > 50_000
    words = (drawn / "paper.tex").read_text()
    assert all(rf"\fig{{{name}}}" in words for name in FIGURES)
    assert r"\tab{summary}" in words and r"\tab{claims}" in words


@needs_latex
def test_an_error_of_latex_is_one_line(drawn: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "broken.tex"
    source.write_text("\\documentclass{article}\\begin{document}\\nonsense\\end{document}")
    assert paper.main(["--study-dir", str(drawn), "--source", str(source), "--out", str(tmp_path / "x.pdf")]) == 2
    said = capsys.readouterr().err
    assert "Undefined control sequence" in said and said.count("\n") == 1


def test_figures_that_were_not_drawn_are_named(mixed: StudyData, tmp_path: Path) -> None:
    with pytest.raises(paper.AnalysisError, match="no figure throughput_vs_rate"):
        paper.preamble(mixed, tmp_path)


def test_without_latex_it_says_what_to_install(
    drawn: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert paper.main(["--study-dir", str(drawn)]) == 2
    assert "latexmk" in capsys.readouterr().err
