r"""The tables of a study as CSV (full precision) and LaTeX (booktabs, siunitx columns).

`kvstudy table --study-dir results/<study>` writes them all. The LaTeX files are bare `tabular`s to
`\input` into a paper; they need booktabs and siunitx. The document prints the same rows, so that paper and
report cannot disagree. To add one: a function with `@table(name)` in a module here that is imported below, and its
name in `kvstudy.report.TABLES`.
"""

from __future__ import annotations

from kvstudy.report.command import command
from kvstudy.report.tables import admission, measured, quality, workloads
from kvstudy.report.tables.measured import leaders
from kvstudy.report.tables.registry import TABLES, table, write

__all__ = ["TABLES", "admission", "leaders", "main", "measured", "quality", "table", "workloads", "write"]

#: `kvstudy table`.
main = command("table", "Write tables of a study, as CSV and LaTeX.", TABLES, write, ".csv, .tex")
