"""A table as it is printed, and as a LaTeX `tabular` (booktabs, siunitx columns); text as LaTeX prints it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import pandas as pd


@dataclass(frozen=True)
class Column:
    """A column: its header, unit, whether it holds numbers, and whether it holds text that wraps."""

    label: str
    unit: str = ""
    numeric: bool = True
    wide: bool = False


@dataclass
class Table:
    """A table as it is printed (`rows`) and as data (`frame`).

    `groups` sets rows apart where it changes, `heads` prints a line above where it changes, `bold` marks
    cells (row, column), `cells` are the ids of the cells that a row's numbers came from.
    """

    name: str
    title: str
    note: str
    columns: list[Column]
    rows: list[list[str]]
    frame: pd.DataFrame
    empty: str = ""
    groups: list[str] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    bold: set[tuple[int, int]] = field(default_factory=set)
    cells: list[list[str]] = field(default_factory=list)


_SPECIAL = {"\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_"}
_SPECIAL |= {"†": r"$\dagger$", "≈": r"$\approx$", "\N{NO-BREAK SPACE}": "~"}
_SPECIAL |= {"{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_SPECIAL |= {
    "·": r"\textperiodcentered{}",
    "–": "--",
    "∞": r"$\infty$",
    "×": r"$\times$",
    "≥": r"$\ge$",
    "≤": r"$\le$",
    "\N{LEFT DOUBLE QUOTATION MARK}": "``",
    "\N{RIGHT DOUBLE QUOTATION MARK}": "''",
    "\N{NARROW NO-BREAK SPACE}": r"\,",
}


def escape(text: str) -> str:
    """Text as LaTeX prints it."""
    return "".join(_SPECIAL.get(character, character) for character in text)


_PLAIN_NUMBER = re.compile(r"^-?\d+(\.\d+)?$")


def _siunitx(texts: Sequence[str]) -> str:
    """The `table-format` that fits the numbers of a column."""
    whole, decimals = 1, 0
    for text in texts:
        if _PLAIN_NUMBER.match(text):
            left, _, right = text.lstrip("-").partition(".")
            whole, decimals = max(whole, len(left)), max(decimals, len(right))
    return f"S[table-format={whole}.{decimals}]"


def latex(table: Table) -> str:
    """The table as a booktabs `tabular`; what is not a plain number in a number column is in braces."""
    if table.empty:
        return f"% {table.title}: {table.empty}\n"
    columns = list(zip(*table.rows, strict=True)) if table.rows else [() for _ in table.columns]
    clean = [[text.replace("\N{NARROW NO-BREAK SPACE}", "") for text in column] for column in columns]
    # Columns of text share what the others leave of the line.
    share = min(0.36, 0.84 / max(1, sum(column.wide for column in table.columns)))
    text_column = rf">{{\raggedright\arraybackslash}}p{{{share:.2f}\linewidth}}"
    spec = " ".join(
        _siunitx(texts) if column.numeric else text_column if column.wide else "l"
        for column, texts in zip(table.columns, clean, strict=True)
    )
    header = []
    for column in table.columns:
        text = escape(column.label) + (f" ({escape(column.unit)})" if column.unit else "")
        header.append(f"{{{text}}}" if column.numeric else text)
    lines = [
        f"% {table.title}. Needs \\usepackage{{array,booktabs,siunitx}}.",
        f"\\begin{{tabular}}{{@{{}}{spec}@{{}}}}",
        "\\toprule",
        " & ".join(header) + " \\\\",
        "\\midrule",
    ]
    before = head = ""
    for place, row in enumerate(table.rows):
        group = table.groups[place] if table.groups else ""
        if table.heads and table.heads[place] != head:
            head, before = table.heads[place], group
            lines.append("\\addlinespace") if place else None
            lines.append(f"\\multicolumn{{{len(table.columns)}}}{{@{{}}l}}{{\\emph{{{escape(head)}}}}} \\\\")
        elif before and group != before:
            lines.append("\\addlinespace")
        before = group
        cells: list[str] = []
        for column, text in zip(table.columns, row, strict=True):
            strong = (place, len(cells)) in table.bold
            bare = text.replace("\N{NARROW NO-BREAK SPACE}", "")
            if column.numeric:
                cells.append(bare if _PLAIN_NUMBER.match(bare) else f"{{{escape(bare)}}}")
            else:
                cells.append(f"\\textbf{{{escape(text)}}}" if strong else escape(text))
        lines.append(" & ".join(cells) + " \\\\")
    lines += ["\\bottomrule", "\\end{tabular}"]
    return "\n".join(lines) + "\n"
