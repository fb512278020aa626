"""Rows that a benchmark printed with `--json`, as a table for a page of docs: `python -m benchmarks.table FILE ...`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def markdown(rows: Iterable[Mapping[str, Any]]) -> str:
    """A line a row: what was measured, its ratio and target, and what stands beside it."""
    lines = ["| row | value | ratio | target | beside |", "|---|---|---|---|---|"]
    for row in rows:
        if row["name"].endswith(": took"):
            continue
        met = "" if row["met"] is None else f"{number(row['target'])}, {'met' if row['met'] else '**not met**'}"
        beside = "; ".join(f"{name} {number(value)}" for name, value in row["beside"].items())
        lines.append(
            f"| {row['name']} | {number(row['value'])} {row['unit']} | {number(row['ratio'])} | {met} | {beside} |"
        )
    return "\n".join(lines)


def number(value: float | None) -> str:
    """Three digits, thousands apart."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="what `--json` printed")
    print(markdown(row for file in parser.parse_args().files for row in json.loads(file.read_text())["rows"]))


if __name__ == "__main__":
    main()
