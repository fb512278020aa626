"""The LaTeX route: reports/paper/main.tex, which inputs the figures and tables of a study as they are.

`kvstudy paper --study-dir results/<study>` writes paper.tex (title, question, and which floats there are) into the
study's folder and compiles the paper beside it. It needs latexmk and a LaTeX with siunitx (Debian: latexmk,
texlive-latex-extra, texlive-science).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kvstudy.analysis.plan import AnalysisError
from kvstudy.grid.store import write_text
from kvstudy.report import FIGURES, TABLES
from kvstudy.report.answers import answers
from kvstudy.report.data import StudyData
from kvstudy.report.latex import escape
from kvstudy.report.tables import TABLES as MAKERS

#: The paper's source in this checkout.
SOURCE = Path(__file__).resolve().parents[3] / "reports" / "paper" / "main.tex"

#: Said first by every error of LaTeX.
ERROR = "! "


def preamble(data: StudyData, figures: Path) -> str:
    """What the source inputs: the study's words, and its figures with their captions and tables, in the report's order.

    Raises
    ------
    AnalysisError
        A figure has not been drawn.
    """
    captions = {name: figures / f"{name}.caption.txt" for name in FIGURES}
    absent = [name for name, path in captions.items() if not path.is_file()]
    if absent:
        raise AnalysisError(f"no figure {', '.join(absent)} in {figures}: draw them with `kvstudy figure`")
    lines = [
        rf"\newcommand{{\studytitle}}{{{escape(data.study.get('title', ''))}}}",
        rf"\newcommand{{\studyquestion}}{{{escape(data.study.get('question', ''))}}}",
        rf"\newcommand{{\studyanswer}}{{{escape(' '.join(item.text for item in answers(data)))}}}",
        r"\newcommand{\allfigures}{%",
        *(
            rf"  \fig{{{name}}}{{{escape(path.read_text(encoding='utf-8').strip())}}}%"
            for name, path in captions.items()
        ),
        "}",
        r"\newcommand{\alltables}{%",
    ]
    titles = {name: MAKERS[name](data) for name in TABLES}
    for name, made in titles.items():
        if name != "setup" and not made.empty:
            lines.append(rf"  \tab{{{name}}}{{{escape(f'{made.title}. {made.note}'.strip())}}}%")
    lines += ["}", rf"\newcommand{{\setuptitle}}{{{escape(titles['setup'].title)}}}"]
    return "\n".join(lines) + "\n"


def compile_paper(source: Path, study_dir: Path, out: Path) -> None:
    """Compile `source`, whose macro `study` is made to name the study's folder.

    Raises
    ------
    AnalysisError
        There is no latexmk, or LaTeX found an error; says which.
    """
    latexmk = shutil.which("latexmk")
    if latexmk is None:
        raise AnalysisError("no latexmk: install it and LaTeX (Debian: latexmk texlive-latex-extra texlive-science)")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(latexmk, "-pdf", "-interaction=nonstopmode", "-halt-on-error", f"-outdir={folder}", "-jobname=paper"),
            rf"-usepretex=\def\study{{{study_dir.resolve()}}}",
            str(source.resolve()),
        ]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        pdf = Path(folder) / "paper.pdf"
        if done.returncode or not pdf.is_file():
            said = [line for line in done.stdout.splitlines() if line.startswith(ERROR)]
            tail = (done.stdout + done.stderr).strip().splitlines()[-1:] or ["latexmk gave no reason"]
            raise AnalysisError(f"{source} does not compile: {(said or tail)[0].removeprefix(ERROR)}")
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(pdf, out.with_suffix(".tmp"))
    out.with_suffix(".tmp").replace(out)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="kvstudy paper", description="Compile the LaTeX paper of a study.")
    parser.add_argument("--study-dir", type=Path, required=True, help="folder that holds figures/ and tables/")
    parser.add_argument("--results", type=Path, help="results folder (default: the study folder's parent)")
    parser.add_argument("--source", type=Path, default=SOURCE, help="default: reports/paper/main.tex")
    parser.add_argument("--out", type=Path, help="default: paper.pdf in the study folder")
    options = parser.parse_args(argv)
    out = options.out or options.study_dir / "paper.pdf"
    try:
        data = StudyData.load(options.study_dir, options.results)
        write_text(options.study_dir / "paper.tex", preamble(data, options.study_dir / "figures"))
        compile_paper(options.source, options.study_dir, out)
    except AnalysisError as error:
        print(f"kvstudy: {error}", file=sys.stderr)
        return 2
    print(f"paper -> {out}")
    return 0
